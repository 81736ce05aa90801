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


class Caller:
    """Asks until there is a reply, within the policy and the pace.

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
        self.counts: Counter[str] = Counter()

    async def call(self, request: CoachRequest) -> CoachReply:
        """Raises `PassingError` when time or attempts are over, `RefusedRequestError` for this request, and
        `CoachError` for what concerns all of them; after that one, for every later call too."""
        call = _Call(self._policy.deadline_s)
        retrying = AsyncRetrying(
            retry=retry_if_exception_type(PassingError),
            stop=lambda state: self._is_over(state, call),
            wait=self._wait,
            reraise=True,
        )
        try:
            return await retrying(self._attempt, request, call)
        except FatalError as error:
            raise self._stop(f"the coach {self._provider.model} cannot be asked: {error}") from error

    async def _attempt(self, request: CoachRequest, call: _Call) -> CoachReply:
        async with self._pace.slot():
            if self._stopped is not None:
                raise CoachError(self._stopped)
            logged = None if self._guard is None else await self._guard.before(request)
            if logged is not None:
                self.counts["logged"] += 1
                return logged
            try:
                reply = await self._asked(request, call)
            except BaseException as error:
                if self._guard is not None:
                    refused = isinstance(error, (FatalError, RefusedRequestError)) or getattr(error, "refused", False)
                    await self._guard.failed(request, billed=call.sent and not refused)
                raise
            if self._guard is not None:
                # Paid for: a cancelled call is booked all the same.
                await asyncio.shield(self._guard.after(request, reply))
            return reply

    async def _asked(self, request: CoachRequest, call: _Call) -> CoachReply:
        estimate = (len(request.system) + len(request.shared) + len(request.question)) // 3 + request.max_tokens
        call.sent = False
        await self._pace.admit(estimate)
        started = time.monotonic()
        self.counts["attempts"] += 1
        self.counts["retries"] += call.begun
        call.sent = True
        try:
            reply = await self._provider.ask(request, min(self._policy.timeout_s, call.left()))
        except PassingError as error:
            if error.rate_limited:
                self.counts["rate_limited"] += 1
                self._pace.too_fast(started, min(error.retry_after_s or 0.0, self._policy.max_wait_s))
            raise
        except RefusedRequestError as error:
            self._refused(error)
            raise
        usage = reply.usage
        used = usage.input_tokens + usage.cache_read_tokens + usage.cache_write_tokens + usage.output_tokens
        self._pace.replied(max(estimate - used, 0) if usage.known else 0)
        self._last_refusal = ("", 0)
        return reply

    def _refused(self, error: RefusedRequestError) -> None:
        if error.too_long:
            return
        said, times = self._last_refusal
        times = times + 1 if said == str(error) else 1
        self._last_refusal = (str(error), times)
        if times >= _SAME_REFUSALS:
            raise self._stop(f"the coach {self._provider.model} refuses call after call: {error}") from error

    def _stop(self, reason: str) -> CoachError:
        self._stopped = f"{reason}; mend it and go on with resume"
        return CoachError(self._stopped)

    def _is_over(self, state: RetryCallState, call: _Call) -> bool:
        return state.attempt_number >= self._policy.max_attempts or state.upcoming_sleep >= call.left()

    def _wait(self, state: RetryCallState) -> float:
        """What the server asks for, or a random part of 0.5 s that doubles; never more than `max_wait_s`."""
        cap = self._policy.max_wait_s
        wait = self._random.uniform(0.5, 1.0) * min(_FIRST_WAIT_S * 2.0 ** min(state.attempt_number - 1, 30), cap)
        error = state.outcome.exception() if state.outcome is not None else None
        asked = error.retry_after_s if isinstance(error, PassingError) else None
        return min(max(wait, asked or 0.0), cap)


class _Call:
    """The time of one call; it begins with the first attempt, not while the call queues for its turn."""

    def __init__(self, deadline_s: float) -> None:
        self.sent = False
        """Whether the attempt under way has left."""
        self._deadline_s = deadline_s
        self._started: float | None = None

    @property
    def begun(self) -> bool:
        return self._started is not None

    def left(self) -> float:
        """Seconds; starts the clock. Never below a millisecond: an attempt that comes too late ends at once."""
        if self._started is None:
            self._started = time.monotonic()
        return max(self._started + self._deadline_s - time.monotonic(), 0.001)
