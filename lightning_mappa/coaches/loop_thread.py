"""An event loop with a thread of its own, for connections that outlive the loops of single steps."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
_CANCEL_S = 5.0
_log = logging.getLogger(__name__)


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
        first_s: float = 10.0,
    ) -> None:
        """Runs `first` there, cancels what is under way, runs `last` and ends the thread. Closing twice is fine.

        `first` is cut after `first_s`, `last` runs all the same, and is no longer waited for after `timeout_s`: a
        warning says so. Raises what `last` raises.
        """
        if self._loop is None or self._thread is None:
            last.close()
            if first is not None:
                first.close()
            return
        loop, thread = self._loop, self._thread
        self._loop = self._thread = None
        ending = asyncio.run_coroutine_threadsafe(_finish(first, first_s, last, timeout_s, self._name), loop)
        try:
            ending.result(first_s + _CANCEL_S + timeout_s + _CANCEL_S)
        except TimeoutError:  # something blocks the loop itself
            _log.warning("%s does not end", self._name)
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join(_CANCEL_S)
            if not thread.is_alive():
                loop.close()

    def _running(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name=self._name, daemon=True)
            self._thread.start()
        return self._loop


async def _finish(
    first: Coroutine[Any, Any, None] | None, first_s: float, last: Coroutine[Any, Any, None], last_s: float, name: str
) -> None:
    if first is not None:
        with contextlib.suppress(Exception):
            await asyncio.wait_for(first, first_s)
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others, timeout=_CANCEL_S)
    ending = asyncio.ensure_future(last)
    await asyncio.wait((ending,), timeout=last_s)
    if ending.done():
        ending.result()
    else:
        ending.cancel()
        _log.warning("%s has not ended within %g s", name, last_s)
