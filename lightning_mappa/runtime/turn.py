"""One thread at a time, in a fixed order: what makes `runtime=local` reproducible and free of deadlocks.

Several parts live in threads of one process because a Lightning Trainer's loop cannot be suspended from
outside. They never run at the same time: a part keeps the turn until it waits, and the first part in the
fixed order whose condition holds gets it next. As conditions are functions of state that only the holder
changes, the order of events is a function of the run's seed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from lightning_mappa.errors import InfrastructureError

Condition = Callable[[], bool]


def await_future(name: str, future: Future[Any], what: str, deadline_s: float) -> None:
    """Until `future` is done, however it ended. Raises `InfrastructureError` after the deadline."""
    if futures.wait([future], timeout=deadline_s).not_done:
        raise InfrastructureError(f"{name} waited more than {deadline_s:g} s for {what}")


class Turn:
    """Hands one turn among named participants.

    Args:
        names: the participants; where several could go on, the earliest named does.
        deadline_s: the longest wait; longer raises `InfrastructureError`.
    """

    def __init__(self, names: Sequence[str], deadline_s: float) -> None:
        self._names = tuple(names)
        self._deadline_s = deadline_s
        self._changed = threading.Condition()
        self._waiting: dict[str, tuple[Condition, str]] = {name: (lambda: True, "start") for name in names}
        self._holder: str | None = None
        self._stalled: str | None = None

    @contextmanager
    def taken_by(self, name: str) -> Iterator[None]:
        """A participant's whole life: enters with the turn, gives it up for good at the end."""
        with self._changed:
            if self._holder is None:
                self._hand_over()
            self._await_turn(name, "start")
        try:
            yield
        finally:
            with self._changed:
                self._waiting.pop(name, None)
                if self._holder == name:
                    self._hand_over()

    def wait(self, name: str, condition: Condition, what: str) -> None:
        """Gives up the turn until `condition` holds and it is `name`'s turn again.

        Raises:
            InfrastructureError: after the deadline, or at once when no participant can go on.
        """
        with self._changed:
            if self._holder != name:
                raise InfrastructureError(f"{name} waits for {what} without holding the turn")
            self._waiting[name] = (condition, what)
            self._hand_over()
            self._await_turn(name, what)

    def await_result(self, name: str, future: Future[Any], what: str) -> None:
        """Keeps the turn: what the others do meanwhile would depend on how long the work takes."""
        await_future(name, future, what, self._deadline_s)

    def _await_turn(self, name: str, what: str) -> None:
        arrived = self._changed.wait_for(
            lambda: self._holder == name or self._stalled is not None, timeout=self._deadline_s
        )
        if self._stalled is not None:
            raise InfrastructureError(self._stalled)
        if not arrived:
            raise InfrastructureError(f"{name} waited more than {self._deadline_s:g} s for {what}")
        self._waiting.pop(name, None)

    def _hand_over(self) -> None:
        self._holder = next((name for name in self._names if name in self._waiting and self._waiting[name][0]()), None)
        if self._holder is None and self._waiting:
            waits = ", ".join(f"{name} for {what}" for name, (_, what) in self._waiting.items())
            self._stalled = f"no part of the run can go on: {waits}"
        self._changed.notify_all()
