"""How many calls are under way, and how soon the next may start: one pace for all calls of a coach."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Pace:
    """Lives on one event loop.

    The concurrency limit is halved when the server says that it is too much, at most once for the calls that were
    under way together, and grows by one with every limit's worth of replies. At a limit of one, calls are probes.

    Args:
        requests_per_minute: None knows no limit.
        tokens_per_minute: of prompts and replies together; None knows no limit.
    """

    def __init__(
        self,
        max_concurrency: int,
        requests_per_minute: float | None = None,
        tokens_per_minute: float | None = None,
    ) -> None:
        self.limit = float(max_concurrency)
        self._max = max_concurrency
        self._active = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._paused_until = 0.0
        self._slowed_at = 0.0
        self._requests = None if requests_per_minute is None else _Bucket(requests_per_minute)
        self._tokens = None if tokens_per_minute is None else _Bucket(tokens_per_minute)

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Held while a call is under way; first come, first served."""
        await self._acquire()
        try:
            while (left := self._paused_until - time.monotonic()) > 0:
                await asyncio.sleep(left)
            yield
        finally:
            self._active -= 1
            self._wake()

    async def admit(self, tokens: int) -> None:
        """Waits until a request of about `tokens` is within the rates."""
        if self._requests is not None:
            await self._requests.take(1)
        if self._tokens is not None:
            await self._tokens.take(tokens)

    def replied(self, spare_tokens: int) -> None:
        """A reply is there, `spare_tokens` below what `admit` was told."""
        if self._tokens is not None:
            self._tokens.give_back(spare_tokens)
        self.limit = min(self.limit + 1 / self.limit, self._max)
        self._wake()

    def too_fast(self, started: float, pause_s: float) -> None:
        """The server refused a call that began at `started` (monotonic); nobody begins for `pause_s`."""
        now = time.monotonic()
        self._paused_until = max(self._paused_until, now + pause_s)
        if started >= self._slowed_at:
            self.limit = max(self.limit / 2, 1.0)
            self._slowed_at = now

    async def _acquire(self) -> None:
        if not self._waiting and self._active < int(self.limit):
            self._active += 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._waiting.remove(turn)
            else:  # it was handed over in the same moment
                self._active -= 1
                self._wake()
            raise

    def _wake(self) -> None:
        for turn in [turn for turn in self._waiting if not turn.done()]:
            if self._active >= int(self.limit):
                return
            self._waiting.remove(turn)
            self._active += 1
            turn.set_result(None)


class _Bucket:
    """Fills with time, holds five seconds' worth, and may be in debt: who takes more waits until it is paid."""

    def __init__(self, per_minute: float) -> None:
        self._per_s = per_minute / 60
        self._most = max(per_minute / 12, 1.0)
        self._level = self._most
        self._seen = time.monotonic()

    async def take(self, amount: float) -> None:
        self._fill()
        self._level -= amount
        if self._level < 0:
            await asyncio.sleep(-self._level / self._per_s)

    def give_back(self, amount: float) -> None:
        self._fill()
        self._level = min(self._level + amount, self._most)

    def _fill(self) -> None:
        now = time.monotonic()
        self._level = min(self._level + (now - self._seen) * self._per_s, self._most)
        self._seen = now
