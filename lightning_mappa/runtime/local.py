"""`runtime=local`: coordinator, engine and Trainers as threads of one process that take turns."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from lightning_mappa.agent_trainer import AgentParts, agent_parts, train_agent
from lightning_mappa.agents import load_agents
from lightning_mappa.memory import peak_rss_gib
from lightning_mappa.run_folder import RunFolder
from lightning_mappa.runtime.board import DRIVER, Board
from lightning_mappa.runtime.board_link import BoardLink
from lightning_mappa.runtime.turn import Turn
from lightning_mappa.system import build_engine, longest_wait_s

JOIN_S = 60.0
M_ARENA_MAX = -8
"""As malloc.h of glibc names it."""


class LocalPlace:
    """All parts of a run in this process; see `runtime.base.Place`."""

    stages_weights = False

    def __init__(self, cfg: DictConfig) -> None:
        self._cfg = cfg
        self._agents = load_agents(cfg)
        self._parts: dict[str, AgentParts] = {}
        self.facts = {agent_id: agent.facts for agent_id, agent in self._agents.items()}
        self.engine = build_engine(cfg, self._agents)
        trained = [agent_id for agent_id, facts in self.facts.items() if facts.trained]
        self.turns = Turn((DRIVER, *trained), longest_wait_s(cfg))

    def prepare(self) -> None:
        for agent_id, agent in self._agents.items():
            if agent.facts.trained:
                self._parts[agent_id] = agent_parts(self._cfg, agent)

    def train(self, board: Board, folder: RunFolder, checkpoint: Path | None, drive: Callable[[], None]) -> None:
        trainers = {
            agent_id: partial(train_agent, self._cfg, folder, parts, checkpoint)
            for agent_id, parts in self._parts.items()
        }
        run_threads(board, trainers, drive)

    def usage(self) -> dict[str, Any]:
        return {"peak_rss_gib": {"driver": peak_rss_gib()}}

    def close(self) -> None:
        self.engine.close()


def run_threads(board: Board, trainers: Mapping[str, Callable[[BoardLink], None]], drive: Callable[[], None]) -> None:
    """Starts a thread per Trainer, drives them in this one, and joins them.

    Raises the first error of the driver or of a Trainer.
    """
    share_one_heap()
    threads = [
        threading.Thread(target=_live, args=(board, agent, body), name=f"trainer-{agent}", daemon=True)
        for agent, body in trainers.items()
    ]
    for thread in threads:
        thread.start()
    with board.turns.taken_by(DRIVER):
        try:
            drive()
        except BaseException as error:
            board.fail(DRIVER, error)
    for thread in threads:
        thread.join(timeout=JOIN_S)
    board.raise_first_error()


def _live(board: Board, agent_id: str, body: Callable[[BoardLink], None]) -> None:
    link = BoardLink(board, agent_id)
    try:
        with board.turns.taken_by(agent_id):
            try:
                body(link)
                link.leave()
            except BaseException as error:
                link.leave(error)
    except BaseException as error:
        board.fail(agent_id, error)


def share_one_heap() -> None:
    """Lets the Trainer threads allocate from one heap, where the C library is one that can.

    glibc gives every thread a heap of its own and keeps there what the thread has freed. The Trainers never run
    at the same time, so each would hold on to the activations of its last update while another one works.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_ARENA_MAX, 1)
