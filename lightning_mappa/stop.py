"""SIGINT and SIGTERM as a request to stop: the first saves, the second leaves at once."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from lightning_mappa.errors import ExitCode


class StopRequest:
    """Set by the first signal; whoever runs something that can be dropped registers how to drop it."""

    def __init__(self) -> None:
        self.requested = False
        self._drop: Callable[[], object] | None = None

    def request(self) -> None:
        self.requested = True
        if self._drop is not None:
            self._drop()

    @contextmanager
    def dropping(self, drop: Callable[[], object]) -> Iterator[None]:
        """While inside, a request also calls `drop` (from the main thread's signal handler)."""
        self._drop = drop
        try:
            yield
        finally:
            self._drop = None

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """Listens to SIGINT and SIGTERM; the handlers from before come back at the end. Main thread only."""

        def handle(signum: int, frame: FrameType | None) -> None:
            if self.requested:
                os._exit(ExitCode.PREEMPTED)
            self.request()

        before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
