"""One retry policy for all providers: a total deadline, jitter, capped waits, and errors by what they concern."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type

from lightning_mappa.coaches.pace import Pace
from lightning_mappa.coaches.provider import (
    CallGuard,
    CoachReply,
    CoachRequest,
    FatalError,
    PassingError,
    Provider,
    RefusedRequestError,
)
from lightning_mappa.errors import CoachError, ConfigError

_FIRST_WAIT_S = 0.5
_SAME_REFUSALS = 3
"""So many calls in a row that are refused for one reason are no fault of the calls."""
_LEAST_SHARE = 0.1
_BOOKING_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    deadline_s: float
    """Of one call with all its attempts and waits, from the start of its first attempt."""
    timeout_s: float
    """Of one attempt."""
    max_attempts: int
    max_wait_s: float
    """No pause between two attempts is longer, whatever the server asks for."""

    def __post_init__(self) -> None:
        for name in ("deadline_s", "timeout_s", "max_attempts", "max_wait_s"):
            value = getattr(self, name)
            if not 0 < value < float("inf"):
                raise ConfigError(f"coach.{name} is {value}; allowed: more than 0")

    @property
    def least_s(self) -> float:
        """An attempt for which less is left than a tenth of what one may take is not made: it would be paid for, and
        cut before its reply."""
        return _LEAST_SHARE * min(self.timeout_s, self.deadline_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    reply: CoachReply
    replayed: bool
    """The guard had it already: nothing was asked."""


class Caller:
    """Asks until there is a reply, within the policy and the pace.

    An attempt that has left goes on when the call is cancelled: it may be billed, and so its reply goes to the guard.

    `counts` holds `attempts`, `retries`, `rate_limited` and `logged` (replies the guard already had).
    """

    def __init__(self, provider: Provider, policy: RetryPolicy, pace: Pace, guard: CallGuard | None) -> None:
        self._provider = provider
        self._policy = policy
        self._pace = pace
        self._guard = guard
        self._random = random.Random()  # timing only; the global generator belongs to the run
        self._last_refusal = ("", 0)
        self._stopped: str | None = None
        self._open: set[asyncio.Task[Answer]] = set()
        """Attempts that the guard knows of."""
        self._in_flight: set[asyncio.Task[Answer]] = set()
        """Attempts that have left and are not booked yet; each ends within `RetryPolicy.timeout_s`."""
        self.counts: Counter[str] = Counter()

    async def call(self, request: CoachRequest) -> Answer:
        """Raises `PassingError` when time or attempts are over, `RefusedRequestError` for this request, and
        `CoachError` for what concerns all of them; after that one, for every later call too."""
        call = _Call(self._policy)
        retrying = AsyncRetrying(
            retry=retry_if_exception_type(PassingError),
            stop=lambda state: self._is_over(state, call),
            wait=self._wait,
            reraise=True,
        )
        try:
            return await retrying(self._kept, request, call)
        except PassingError as error:
            if not call.out_of_time:
                raise
            raise PassingError(f"deadline of {self._policy.deadline_s:g} s, {error}") from error

    async def halt(self, reason: str) -> None:
        """No later call leaves, and each raises `CoachError` with `reason`. Returns when those in flight are booked;
        they go on where it is cancelled. One that takes longer than an attempt may, as while an engine starts, is cut
        and booked with the most that it can have cost."""
        self._stopped = self._stopped or reason
        for attempt in self._open - self._in_flight:
            attempt.cancel()
        if self._open:
            await asyncio.wait(set(self._open), timeout=self._policy.timeout_s + _BOOKING_S)
        late = set(self._open)
        for attempt in late:
            attempt.cancel()
        if late:
            await asyncio.wait(late, timeout=_BOOKING_S)

    async def drain(self) -> None:
        """Returns when the calls in flight are booked; until then no other leaves."""
        stopped = self._stopped
        await self.halt("the coach is closed")
        self._stopped = stopped

    async def _kept(self, request: CoachRequest, call: _Call) -> Answer:
        attempt = asyncio.create_task(self._attempt(request, call))
        attempt.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # somebody may have left
        try:
            return await asyncio.shield(attempt)
        except asyncio.CancelledError:
            if attempt not in self._in_flight:
                attempt.cancel()
                await asyncio.gather(attempt, return_exceptions=True)
            this = asyncio.current_task()
            if self._stopped is not None and this is not None and not this.cancelling():
                raise CoachError(self._stopped) from None
            raise

    async def _attempt(self, request: CoachRequest, call: _Call) -> Answer:
        async with self._pace.slot():
            if self._stopped is not None:
                raise CoachError(self._stopped)
            task = asyncio.current_task()
            assert task is not None
            self._open.add(task)
            try:
                logged = None if self._guard is None else await self._guard.before(request)
                if logged is not None:
                    self.counts["logged"] += 1
                    return Answer(reply=logged, replayed=True)
                reply = await self._asked(request, call, task)
                if self._guard is not None:
                    await self._guard.after(request, reply)
            finally:
                self._open.discard(task)
                self._in_flight.discard(task)
            return Answer(reply=reply, replayed=False)

    async def _asked(self, request: CoachRequest, call: _Call, task: asyncio.Task[Answer]) -> CoachReply:
        """Tells the guard of a call that came to no reply."""
        try:
            return await self._exchange(request, call, task)
        except BaseException as error:
            call.said = str(error)
            stop = self._concerns_all(error)
            if self._guard is not None:
                refused = isinstance(error, (FatalError, RefusedRequestError)) or getattr(error, "refused", False)
                await self._guard.failed(request, billed=task in self._in_flight and not refused)
            if stop is not None:
                raise stop from error
            raise

    async def _exchange(self, request: CoachRequest, call: _Call, task: asyncio.Task[Answer]) -> CoachReply:
        estimate = (len(request.system) + len(request.shared) + len(request.question)) // 3 + request.max_tokens
        await self._pace.admit(estimate)
        again = call.begun
        if call.too_late():
            raise PassingError(call.said)
        if self._guard is not None:
            await self._guard.sent(request)
        if self._stopped is not None:
            raise CoachError(self._stopped)
        started = time.monotonic()
        self.counts["attempts"] += 1
        self.counts["retries"] += again
        self._in_flight.add(task)
        try:
            reply = await self._provider.ask(request, min(self._policy.timeout_s, call.left()))
        except PassingError as error:
            if error.rate_limited:
                self.counts["rate_limited"] += 1
                self._pace.too_fast(started, min(error.retry_after_s or 0.0, self._policy.max_wait_s))
            raise
        usage = reply.usage
        used = usage.input_tokens + usage.cache_read_tokens + usage.cache_write_tokens + usage.output_tokens
        self._pace.replied(max(estimate - used, 0) if usage.known else 0)
        self._last_refusal = ("", 0)
        return reply

    def _concerns_all(self, error: BaseException) -> CoachError | None:
        """What ends the run, where the fault is not of this call alone."""
        if isinstance(error, FatalError):
            return self._stop(f"the coach {self._provider.model} cannot be asked: {error}")
        if isinstance(error, RefusedRequestError) and not error.too_long:
            said, times = self._last_refusal
            times = times + 1 if said == str(error) else 1
            self._last_refusal = (str(error), times)
            if times >= _SAME_REFUSALS:
                return self._stop(f"the coach {self._provider.model} refuses call after call: {error}")
        return None

    def _stop(self, reason: str) -> CoachError:
        self._stopped = f"{reason}; mend it and go on with resume"
        return CoachError(self._stopped)

    def _is_over(self, state: RetryCallState, call: _Call) -> bool:
        return state.attempt_number >= self._policy.max_attempts or call.too_late(state.upcoming_sleep)

    def _wait(self, state: RetryCallState) -> float:
        """What the server asks for, or a random part of 0.5 s that doubles; never more than `max_wait_s`."""
        cap = self._policy.max_wait_s
        wait = self._random.uniform(0.5, 1.0) * min(_FIRST_WAIT_S * 2.0 ** min(state.attempt_number - 1, 30), cap)
        error = state.outcome.exception() if state.outcome is not None else None
        asked = error.retry_after_s if isinstance(error, PassingError) else None
        return min(max(wait, asked or 0.0), cap)


class _Call:
    """The time of one call; it begins with the first attempt, not while the call queues for its turn."""

    def __init__(self, policy: RetryPolicy) -> None:
        self.said = ""
        """By the last attempt that failed."""
        self.out_of_time = False
        self._policy = policy
        self._started: float | None = None

    @property
    def begun(self) -> bool:
        return self._started is not None

    def left(self) -> float:
        """Seconds; starts the clock."""
        if self._started is None:
            self._started = time.monotonic()
        return self._started + self._policy.deadline_s - time.monotonic()

    def too_late(self, in_s: float = 0.0) -> bool:
        """Whether there is no time for an attempt that begins `in_s` from now."""
        self.out_of_time = self.left() - in_s < self._policy.least_s
        return self.out_of_time
