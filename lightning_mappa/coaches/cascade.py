"""Dear coaches only for the actions that cheap ones are not sure of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lightning_mappa.coaches.base import Coach, ask, share_budget, unjudgeable
from lightning_mappa.errors import ConfigError
from lightning_mappa.types import Episode, Verdict


class CascadeCoach:
    """A `Coach` that asks one coach after the other, the cheapest first, until a verdict stands.

    The first coach's score stands where `accept` has it. A later one stands unless it differs from the score before
    it by more than `tolerance`; where the coaches before it gave none there is nothing to differ from. The last
    coach's verdict stands, a missing one too: it is asked where those before it could not settle the matter.

    Args:
        accept: intervals, ends included, as ((0, 2), (9, 10)); none: the first coach never decides alone.
        tolerance: in points of the score.
        budget_usd, budget_calls: caps over all its coaches together, beside their own; None is none.
    """

    def __init__(
        self,
        coaches: Sequence[Coach],
        *,
        accept: Sequence[Sequence[float]] = (),
        tolerance: float = 2.0,
        budget_usd: float | None = None,
        budget_calls: int | None = None,
    ) -> None:
        if not coaches:
            raise ConfigError("coach.coaches is empty; give a cascade 1 coach or more")
        if any(len(interval) != 2 or interval[0] > interval[1] for interval in accept):
            raise ConfigError(f"coach.accept is {accept}; allowed: intervals [lowest, highest] of scores")
        self.name = "cascade"
        self.parts = tuple(coaches)
        self._accept = tuple((low, high) for low, high in accept)
        self._tolerance = tolerance
        share_budget(self, usd=budget_usd, calls=budget_calls)

    async def score(self, episode: Episode, index: int) -> Verdict:
        """`Verdict.coach` is the coach that decided; the reason shows what those before it gave."""
        before: list[Verdict] = []
        for number, coach in enumerate(self.parts):
            verdict = await ask(coach, episode, index)
            if number == len(self.parts) - 1 or self._stands(verdict, before):
                return _after(before, verdict)
            before.append(verdict)
        raise AssertionError("the last coach's verdict stands")

    def _stands(self, verdict: Verdict, before: Sequence[Verdict]) -> bool:
        score = verdict.score
        if score is None:
            return False
        if not before:
            return any(low <= score <= high for low, high in self._accept)
        last = next((earlier.score for earlier in reversed(before) if earlier.score is not None), None)
        return last is None or abs(score - last) <= self._tolerance


def _after(before: Sequence[Verdict], verdict: Verdict) -> Verdict:
    if not before:
        return verdict
    path = ", ".join(f"{v.coach} {'missing' if v.score is None else format(v.score, 'g')}" for v in before)
    nothing = verdict.score is None and unjudgeable((*before, verdict))
    return replace(verdict, reason=f"after {path}: {verdict.reason}", unjudgeable=nothing)
