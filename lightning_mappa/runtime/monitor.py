"""One part at a time, whoever comes first: how a run takes turns with parts in other processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from lightning_mappa.errors import InfrastructureError

POLL_S = 0.1


class Monitor:
    """A lock that is given up while its holder waits.

    Unlike `Turn` it knows of work that it cannot see, so that nobody is told that nothing can go on. What a run
    samples and trains does not depend on who comes first: rollouts and credit are formed when all are there.
    """

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._changed = threading.Condition()

    @contextmanager
    def taken_by(self, name: str) -> Iterator[None]:
        with self._changed:
            try:
                yield
            finally:
                self._changed.notify_all()

    def wait(self, name: str, condition: Callable[[], bool], what: str) -> None:
        """Raises `InfrastructureError` after the deadline."""
        self._changed.notify_all()
        if not self._changed.wait_for(condition, timeout=self._deadline_s):
            raise InfrastructureError(f"{name} waited more than {self._deadline_s:g} s for {what}")

    def await_result(self, name: str, future: Future[Any], what: str) -> None:
        """Lets the others work meanwhile.

        Looks now and then: a callback would have to take the lock in the thread that resolves the future, while
        the holder may be waiting for that thread to end.
        """
        self._changed.notify_all()
        deadline = time.monotonic() + self._deadline_s
        while not self._changed.wait_for(future.done, timeout=POLL_S):
            if time.monotonic() > deadline:
                raise InfrastructureError(f"{name} waited more than {self._deadline_s:g} s for {what}")
