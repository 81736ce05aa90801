"""What stands between a coach and its provider: nothing is paid twice, and nothing past the cap."""

from __future__ import annotations

import asyncio
import hashlib
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


@dataclass(frozen=True, slots=True, eq=False)
class _Attempt:
    """A call in flight."""

    reservations: tuple[Reservation, ...]
    """One of every budget."""
    started: float
    """Monotonic seconds."""


class BudgetGuard:
    """A `CallGuard` that keeps accounts.

    A request is answered from the run's own log, else from the cache, else it is asked and paid for. The same
    content may be asked more than once (a second sample, an unusable reply): the n-th time gets the n-th reply.
    After a kill only the calls that were in flight are paid again; the caps do not know of their first time. A call of
    which it is not known whether it is billed (it ran out of time, its connection broke), or what (the server counts no
    tokens), counts with the most that it can have cost.

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
        self._attempts: defaultdict[str, list[_Attempt]] = defaultdict(list)
        """In flight, per content: equal requests may end in any order."""
        self._outcomes: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()
        self._latencies: list[float] = []
        self._unsettled = _FREE

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
        for record in self._log.records:
            self._count(record)
            if record.outcome is not CallOutcome.CACHED:
                for budget in self._budgets:
                    budget.book(Decimal(record.usd))

    async def before(self, request: CoachRequest) -> CoachReply | None:
        key = self._next_key(request)
        logged = None if self._log is None else self._log.reply(key)
        if logged is not None:
            self._given[key[0]] += 1
            self._outcomes["logged"] += 1
            return logged
        cached = None if self._cache is None else self._cache.reply(key)
        if cached is not None:
            self._given[key[0]] += 1
            await self._write(self._record(request, key, CallOutcome.CACHED, reply=cached))
            return cached
        if self._log is not None:
            self._log.check()
        reservations = await self._reserve(_FREE if self._prices is None else self._prices.bound(request))
        self._attempts[key[0]].append(_Attempt(reservations, time.monotonic()))
        return None

    async def after(self, request: CoachRequest, reply: CoachReply) -> None:
        key = self._next_key(request)
        self._given[key[0]] += 1
        attempt, latency_s = self._ended(key)
        usd = self._price(attempt, reply)
        try:
            await self._write(self._record(request, key, CallOutcome.PAID, reply=reply, usd=usd, latency_s=latency_s))
            if self._cache is not None:
                await asyncio.to_thread(self._cache.keep, key, reply)
        finally:
            self._settle(attempt, usd)

    async def failed(self, request: CoachRequest, *, billed: bool = True) -> None:
        key = self._next_key(request)
        attempt, latency_s = self._ended(key)
        usd = attempt.reservations[0].usd if billed else _FREE
        try:
            await self._write(self._record(request, key, CallOutcome.FAILED, usd=usd, latency_s=latency_s))
        finally:
            self._settle(attempt, usd)

    def summary(self) -> dict[str, Any]:
        """Figures of the run so far, resumed parts included.

        `calls` were sent, `failed` of them without an answer; `cached` and `logged` cost nothing. `usd` is None
        without prices; `usd_unsettled` of it are the most that calls can have cost which failed and may be billed, or
        whose reply came without a count of tokens.
        `latency_p50_s` (seconds) is None without an answer.
        """
        return {
            "calls": self._budget.calls,
            "failed": self._outcomes[CallOutcome.FAILED],
            "cached": self._outcomes[CallOutcome.CACHED],
            "logged": self._outcomes["logged"],
            "usd": None if self._prices is None else float(self._budget.spent_usd),
            "usd_unsettled": None if self._prices is None else float(self._unsettled),
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

    def _next_key(self, request: CoachRequest) -> ReplyKey:
        content = asdict(request) | {"call_id": None, "model": self._model, "sent_along": self._sent_along}
        digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        return digest, self._given[digest]

    def _ended(self, key: ReplyKey) -> tuple[_Attempt, float]:
        """An attempt at this content, no longer in flight, and its seconds."""
        attempts = self._attempts[key[0]]
        attempt = attempts.pop(0)
        if not attempts:
            del self._attempts[key[0]]
        return attempt, time.monotonic() - attempt.started

    def _record(
        self,
        request: CoachRequest,
        key: ReplyKey,
        outcome: CallOutcome,
        *,
        reply: CoachReply | None = None,
        usd: Decimal = _FREE,
        latency_s: float | None = None,
    ) -> CallRecord:
        return CallRecord(
            call_id=request.call_id,
            prompt_hash=key[0],
            number=key[1],
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
