"""The driver's end of Trainers in other processes: their calls reach the board, their death breaks the run off."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray

from lightning_mappa.errors import MappaError, RankLost, RunEnded
from lightning_mappa.runtime.board import DRIVER, Board
from lightning_mappa.runtime.board_link import BoardLink
from lightning_mappa.runtime.remote_link import Answer, Call, Ended

POLL_S = 5.0
GRACE_S = 15.0
"""For Trainers to end by themselves after a run has broken off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """One rank of one agent."""

    agent_id: str
    number: int
    actor: Any

    def __str__(self) -> str:
        return f"rank {self.number} of agent {self.agent_id}"


def run_ranks(
    board: Board,
    ranks: Sequence[Rank],
    drive: Callable[[], None],
    *,
    heartbeat_s: float,
    pulse: dict[str, float | None],
) -> None:
    """Serves the ranks' calls and drives them in this thread, until all have ended.

    A rank that dies, or does not answer within `heartbeat_s`, breaks the run off with `RankLost`. Raises the
    first error of the driver or of a Trainer. `pulse` gets the peak memory of every rank in GiB.
    """
    threads = [
        threading.Thread(
            target=_follow, args=(board, rank, ranks), name=f"relay-{rank.agent_id}-{rank.number}", daemon=True
        )
        for rank in ranks
    ]
    over = threading.Event()
    watch = threading.Thread(target=_watch, args=(board, ranks, heartbeat_s, over, pulse), name="pulse", daemon=True)
    for thread in (*threads, watch):
        thread.start()
    with board.turns.taken_by(DRIVER):
        try:
            drive()
        except BaseException as error:
            board.fail(DRIVER, error)
    deadline = time.monotonic() + (GRACE_S if board.errors else max(GRACE_S, heartbeat_s))
    for thread in threads:
        thread.join(timeout=max(0.0, deadline - time.monotonic()))
    over.set()
    watch.join(timeout=heartbeat_s)
    board.raise_first_error()


def _follow(board: Board, rank: Rank, ranks: Sequence[Rank]) -> None:
    """Does what the rank asks for until its Trainer has ended."""
    peers = [other for other in ranks if other.agent_id == rank.agent_id and other is not rank]
    link = BoardLink(board, rank.agent_id)
    try:
        while not isinstance(event := ray.get(rank.actor.next_event.remote(POLL_S)), Ended):
            if event is not None and event.method == "leave":
                event = replace(event, arguments=(_cause(event.arguments[0], peers),))
            if event is not None:
                ray.get(rank.actor.answer.remote(_perform(board, link, event)))
        error = _cause(event.error, peers)
    except ray.exceptions.RayError as lost:
        error = RankLost(f"{rank} is lost: {first_line(lost)}")
    with board.turns.taken_by(rank.agent_id):
        if rank.number == 0 or (error is not None and not isinstance(error, RunEnded)):
            link.leave(error)


def _cause(error: BaseException | None, peers: Sequence[Rank]) -> BaseException | None:
    """What breaks off in a rank whose peer is gone is not the rank's own fault."""
    if error is None or isinstance(error, RunEnded):
        return error
    for peer in peers:
        try:
            ray.get(peer.actor.ping.remote(), timeout=2 * POLL_S)
        except ray.exceptions.RayError as lost:
            return RankLost(f"{peer} is lost: {first_line(lost)}")
    return error


def _perform(board: Board, link: BoardLink, call: Call) -> Answer:
    with board.turns.taken_by(link.agent_id):
        try:
            return Answer(number=call.number, value=getattr(link, call.method)(*call.arguments))
        except MappaError as error:
            return Answer(number=call.number, error=error)
        except Exception as error:  # of ours: the Trainer cannot help it
            board.fail(DRIVER, error)
            return Answer(number=call.number, error=RunEnded(f"the run broke off in {call.method}"))


def _watch(
    board: Board, ranks: Sequence[Rank], heartbeat_s: float, over: threading.Event, pulse: dict[str, float | None]
) -> None:
    """Asks every rank for a sign of life, twice per heartbeat."""
    while True:
        pings = {rank.actor.ping.remote(): rank for rank in ranks}
        answered, silent = ray.wait(list(pings), num_returns=len(pings), timeout=heartbeat_s)
        for ref in silent:
            _lose(board, pings[ref], f"gave no sign of life for {heartbeat_s:g} s")
        for ref in answered:
            try:
                pulse[str(pings[ref])] = ray.get(ref)
            except ray.exceptions.RayError as error:
                _lose(board, pings[ref], f"is lost: {first_line(error)}")
        if over.wait(heartbeat_s / 2) or board.errors:
            return


def _lose(board: Board, rank: Rank, how: str) -> None:
    # Before the turn is taken: the driver may hold it while it waits for what this ends.
    board.fail(rank.agent_id, RankLost(f"{rank} {how}"))
    ray.kill(rank.actor)
    with board.turns.taken_by(rank.agent_id):
        BoardLink(board, rank.agent_id).leave()


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
