"""One Trainer's line to the board of its run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_mappa.algorithm.advantages import ActionCredit, ActionStats
from lightning_mappa.errors import RunEnded
from lightning_mappa.rollout.fingerprint import Fingerprint
from lightning_mappa.runtime.board import Board, Job
from lightning_mappa.runtime.served_weights import PushedWeights
from lightning_mappa.types import ActionKey, Experience


class BoardLink:
    """One agent's line to a `Board`; see `runtime.base.AgentLink`."""

    def __init__(self, board: Board, agent_id: str) -> None:
        self._board = board
        self.agent_id = agent_id
        self.first_step = board.first_step
        self.max_steps = board.max_steps

    def checkpoint_path(self, version: int) -> Path | None:
        self._board.ask(self.agent_id, Job("boundary", version))
        return self._board.checkpoint_part(self.agent_id)

    def checkpoint_saved(self, version: int) -> None:
        self._board.part_saved(self.agent_id)
        self._board.ask(self.agent_id, Job("publish", version))

    def experience(self, step: int) -> Sequence[Experience]:
        self._board.ask(self.agent_id, Job("rollout", step))
        if not self._board.is_open(step):
            raise RunEnded(f"the run ended before step {step}")
        return self._board.ledger.experiences(step, self.agent_id)

    def exchange(
        self, step: int, stats: Mapping[ActionKey, ActionStats], kl_coef: float
    ) -> Mapping[ActionKey, ActionCredit]:
        ledger = self._board.ledger
        ledger.post(step, self.agent_id, stats, kl_coef)
        self._board.wait(self.agent_id, ledger.posted, f"the credit of step {step}")
        return ledger.credits_of(step, self.agent_id)

    def report(self, step: int, metrics: Mapping[str, float]) -> None:
        self._board.ledger.report(step, self.agent_id, metrics)

    def push_weights(self, version: int, tensors: Iterable[tuple[str, Tensor]], fingerprint: Fingerprint) -> None:
        self.push_stored(version, dict(tensors), fingerprint)

    def push_stored(self, version: int, tensors: Any, fingerprint: Fingerprint) -> None:
        """`push_weights` with whatever the engine's `update_weights` takes."""
        board = self._board
        board.weights.push(self.agent_id, PushedWeights(version=version, tensors=tensors, fingerprint=fingerprint))
        board.ledger.record_sync(self.agent_id, version)

    def offer_weights(self, version: int) -> Sequence[Any]:
        return self._board.weights.make_room(self.agent_id)

    def weights_sent(self, version: int, n_bytes: int, fingerprint: Fingerprint) -> None:
        board = self._board
        board.weights.arrived(self.agent_id, version, n_bytes, fingerprint)
        board.ledger.record_sync(self.agent_id, version)

    def evaluation(self, version: int) -> Mapping[str, float]:
        self._board.ask(self.agent_id, Job("evaluate", version))
        return self._board.evaluations[version]

    def leave(self, error: BaseException | None = None) -> None:
        board = self._board
        if error is not None and not isinstance(error, RunEnded):
            board.fail(self.agent_id, error)
        board.ledger.leave(self.agent_id)
        step = board.ledger.step
        board.end(-1 if step is None else step.number)
