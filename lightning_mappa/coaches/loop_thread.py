"""An event loop with a thread of its own, for connections that outlive the loops of single steps."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """Starts with the first call. What runs here goes on while the caller's loop is busy decoding."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Awaits `work` there; cancelling here cancels it there."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._running()))

    def close(
        self,
        last: Coroutine[Any, Any, None],
        timeout_s: float = 10.0,
        *,
        first: Coroutine[Any, Any, None] | None = None,
    ) -> None:
        """Runs `first` there, cancels what is under way, runs `last` and ends the thread. Closing twice is fine."""
        if self._loop is None or self._thread is None:
            last.close()
            if first is not None:
                first.close()
            return
        loop, thread = self._loop, self._thread
        self._loop = self._thread = None
        try:
            asyncio.run_coroutine_threadsafe(_finish(first, last), loop).result(timeout_s)
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join(timeout_s)
            loop.close()

    def _running(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name=self._name, daemon=True)
            self._thread.start()
        return self._loop


async def _finish(first: Coroutine[Any, Any, None] | None, last: Coroutine[Any, Any, None]) -> None:
    if first is not None:
        await first
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await last
