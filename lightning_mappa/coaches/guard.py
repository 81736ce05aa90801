"""What stands between a coach and its provider: nothing is paid twice, and nothing past the cap."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from decimal import Decimal
from pathlib import Path
from statistics import median
from typing import Any

from lightning_mappa.coaches.budget import Budget, Reservation
from lightning_mappa.coaches.call_log import CallLog, CallOutcome, CallRecord, ReplyKey
from lightning_mappa.coaches.pricing import Prices
from lightning_mappa.coaches.provider import CoachReply, CoachRequest
from lightning_mappa.coaches.reply_cache import ReplyCache
from lightning_mappa.errors import ConfigError

LOG = "coach_calls.jsonl"
_FREE = Decimal(0)


@dataclass(slots=True, eq=False)
class _Attempt:
    """A call that may leave, or is in flight."""

    reservations: tuple[Reservation, ...]
    """One of every budget."""
    number: int | None = None
    """Of the attempt in the log; None until it leaves."""
    started: float = 0.0
    """Monotonic seconds; when it left."""


class BudgetGuard:
    """A `CallGuard` that keeps accounts.

    A request is answered from the run's own log, else from the cache, else it is asked and paid for. The same content
    may be asked more than once (a second sample, an unusable reply): by another seed it is another reply, in the log;
    a cache gives its n-th reply to the n-th request for the content.
    After a kill only the calls that were in flight are paid again. They stand in the log before they leave, so that
    the caps hold over kills. A call of which it is not known whether it is billed (it ran out of time, its connection
    broke, its process was killed), or what (the server counts no tokens), counts with the most that it can have cost.

    Args:
        model: as the provider asks for it.
        sent_along: what else decides a reply and is the same for every call, as the effort of thinking.
        budget_usd: cap in dollars over the whole run; needs `prices`.
        budget_calls: cap in calls sent over the whole run.
        prices: model to its dollars per million tokens (`Prices.of`); dollars of a model not in it are not known.
        cache: folder for replies that other runs may use; None keeps none.
    """

    def __init__(
        self,
        *,
        model: str,
        sent_along: str = "",
        budget_usd: float | None = None,
        budget_calls: int | None = None,
        prices: Mapping[str, Mapping[str, Any] | Sequence[Mapping[str, Any]]] | None = None,
        cache: str | Path | None = None,
    ) -> None:
        listed = (prices or {}).get(model)
        if budget_usd is not None and listed is None:
            known = ", ".join(prices or {}) or "no model"
            raise ConfigError(f"budget_usd={budget_usd} needs the prices of {model}; prices are given of {known}")
        self._model = model
        self._sent_along = sent_along
        self._prices = None if listed is None else Prices.of(listed)
        self._budget = Budget(usd=budget_usd, calls=budget_calls)
        self._budgets: tuple[Budget, ...] = (self._budget,)
        """Its own first, then those that it shares."""
        self._cache = None if cache is None else ReplyCache(Path(cache))
        self._log: CallLog | None = None
        self._given: Counter[str] = Counter()
        """Replies given by this process, per content."""
        self._attempts: defaultdict[ReplyKey, list[_Attempt]] = defaultdict(list)
        """In flight; equal requests may end in any order."""
        self._numbers = itertools.count()
        self._outcomes: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()
        self._latencies: list[float] = []
        self._unsettled = _FREE
        self._lost, self._lost_usd = 0, _FREE

    @property
    def cache_folder(self) -> Path | None:
        """Where replies are kept that other runs may use."""
        return None if self._cache is None else self._cache.folder

    def share(self, budget: Budget) -> None:
        """Calls count in this budget too, which others share. Call it before `bind`.

        Raises `ConfigError` where it has a cap in dollars, and the prices of this guard's model are not known.
        """
        if budget.caps_usd and self._prices is None:
            raise ConfigError(f"coach.budget_usd needs the prices of {self._model}: give them in its guard.prices")
        self._budgets = (*self._budgets, budget)

    def bind(self, folder: Path) -> None:
        """Writes the calls to `folder`, and takes those over that an earlier process has written there.

        Call it once, before the first request.
        """
        self._log = CallLog(folder / LOG)
        lost = self._log.lost()
        self._lost, self._lost_usd = len(lost), sum((Decimal(record.usd) for record in lost), _FREE)
        self._unsettled += self._lost_usd
        for record in self._log.records:
            self._count(record)
            if record.outcome not in (CallOutcome.CACHED, CallOutcome.SENT):
                self._book(record)
        for record in lost:
            self._book(record)
        attempts = [record.attempt for record in self._log.records if record.attempt is not None]
        self._numbers = itertools.count(max(attempts, default=-1) + 1)

    async def before(self, request: CoachRequest) -> CoachReply | None:
        key = self._key(request)
        content = key[0]
        logged = None if self._log is None else self._log.reply(key)
        if logged is not None:
            self._given[content] += 1
            self._outcomes["logged"] += 1
            return logged
        cached = None if self._cache is None else self._cache.reply((content, self._given[content]))
        if cached is not None:
            self._given[content] += 1
            await self._write(self._record(request, None, CallOutcome.CACHED, reply=cached))
            return cached
        if self._log is not None:
            self._log.check()
        reservations = await self._reserve(_FREE if self._prices is None else self._prices.bound(request))
        self._attempts[key].append(_Attempt(reservations))
        return None

    async def sent(self, request: CoachRequest) -> None:
        attempt = next(attempt for attempt in self._attempts[self._key(request)] if attempt.number is None)
        attempt.number, attempt.started = next(self._numbers), time.monotonic()
        await self._write(self._record(request, attempt, CallOutcome.SENT, usd=attempt.reservations[0].usd))

    async def after(self, request: CoachRequest, reply: CoachReply) -> None:
        content, attempt = self._key(request)[0], self._ended(request)
        number, usd = self._given[content], self._price(attempt, reply)
        self._given[content] += 1
        try:
            await self._write(self._record(request, attempt, CallOutcome.PAID, reply=reply, usd=usd))
            if self._cache is not None:
                await asyncio.to_thread(self._cache.keep, (content, number), reply)
        finally:
            self._settle(attempt, usd)

    async def failed(self, request: CoachRequest, *, billed: bool = True) -> None:
        attempt = self._ended(request)
        if attempt.number is None:
            for budget, reservation in zip(self._budgets, attempt.reservations, strict=True):
                budget.take_back(reservation)
            return
        usd = attempt.reservations[0].usd if billed else _FREE
        try:
            await self._write(self._record(request, attempt, CallOutcome.FAILED, usd=usd))
        finally:
            self._settle(attempt, usd)

    def summary(self) -> dict[str, Any]:
        """Figures of the run so far, resumed parts included.

        `calls` were sent, `failed` of them without an answer, `calls_lost_in_flight` when their process was killed;
        `cached` and `logged` cost nothing. `usd` is None without prices; `usd_unsettled` of it are the most that calls
        can have cost which failed and may be billed, which were lost in flight (`usd_lost_in_flight` of them), or
        whose reply came without a count of tokens. `usd_in_flight` come on top of `usd`: the most that calls will cost
        which have not ended.
        `latency_p50_s` (seconds) is None without an answer.
        """
        known = self._prices is not None
        return {
            "calls": self._budget.calls,
            "failed": self._outcomes[CallOutcome.FAILED],
            "calls_lost_in_flight": self._lost,
            "cached": self._outcomes[CallOutcome.CACHED],
            "logged": self._outcomes["logged"],
            "usd": float(self._budget.spent_usd) if known else None,
            "usd_unsettled": float(self._unsettled) if known else None,
            "usd_lost_in_flight": float(self._lost_usd) if known else None,
            "usd_in_flight": float(self._budget.committed_usd - self._budget.spent_usd) if known else None,
            "tokens": dict(self._tokens),
            "latency_p50_s": median(self._latencies) if self._latencies else None,
        }

    async def _reserve(self, usd: Decimal) -> tuple[Reservation, ...]:
        """Of every budget, or of none."""
        held: list[Reservation] = []
        try:
            for budget in self._budgets:
                held.append(await budget.reserve(usd))
        except BaseException:
            for budget, reservation in zip(self._budgets, held, strict=False):
                budget.take_back(reservation)
            raise
        return tuple(held)

    def _price(self, attempt: _Attempt, reply: CoachReply) -> Decimal:
        if self._prices is None:
            return _FREE
        return self._prices.cost(reply.usage) if reply.usage.known else attempt.reservations[0].usd

    def _settle(self, attempt: _Attempt, usd: Decimal) -> None:
        for budget, reservation in zip(self._budgets, attempt.reservations, strict=True):
            budget.settle(reservation, usd)

    def _book(self, record: CallRecord) -> None:
        for budget in self._budgets:
            budget.book(Decimal(record.usd))

    def _key(self, request: CoachRequest) -> ReplyKey:
        own = {"call_id": None, "seed": None, "model": self._model, "sent_along": self._sent_along}
        content = json.dumps(asdict(request) | own, sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest(), request.seed

    def _ended(self, request: CoachRequest) -> _Attempt:
        """The attempt at this request, which is no longer in flight."""
        key = self._key(request)
        attempts = self._attempts[key]
        attempt = attempts.pop(0)
        if not attempts:
            del self._attempts[key]
        return attempt

    def _record(
        self,
        request: CoachRequest,
        attempt: _Attempt | None,
        outcome: CallOutcome,
        *,
        reply: CoachReply | None = None,
        usd: Decimal = _FREE,
    ) -> CallRecord:
        """None: nothing was asked."""
        content, seed = self._key(request)
        latency_s = None
        if attempt is not None and outcome is not CallOutcome.SENT:
            latency_s = time.monotonic() - attempt.started
        return CallRecord(
            call_id=request.call_id,
            prompt_hash=content,
            seed=seed,
            attempt=None if attempt is None else attempt.number,
            at=time.time(),
            outcome=outcome,
            model=self._model,
            usd=str(usd),
            latency_s=latency_s,
            reply=reply,
        )

    async def _write(self, record: CallRecord) -> None:
        self._count(record)
        if self._log is not None:
            await self._log.append(record)

    def _count(self, record: CallRecord) -> None:
        self._outcomes[record.outcome] += 1
        if record.outcome is CallOutcome.FAILED or (record.reply is not None and not record.reply.usage.known):
            self._unsettled += Decimal(record.usd)
        if record.outcome is CallOutcome.PAID and record.reply is not None:
            usage = record.reply.usage
            self._tokens.update(
                input=usage.input_tokens,
                cache_read=usage.cache_read_tokens,
                cache_write=usage.cache_write_tokens,
                output=usage.output_tokens,
                thinking=usage.thinking_tokens,
            )
            assert record.latency_s is not None
            self._latencies.append(record.latency_s)
