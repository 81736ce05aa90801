"""Several opinions of one action."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, median
from typing import Literal, get_args

from lightning_mappa.coaches.base import Coach, ask, share_budget, unjudgeable, verdicts_of
from lightning_mappa.errors import ConfigError
from lightning_mappa.types import Episode, Verdict

Reduce = Literal["mean", "median", "trimmed"]
OnDisagreement = Literal["keep", "reask", "abstain"]


class EnsembleCoach:
    """A `Coach` that asks its coaches side by side and makes one score of theirs.

    Missing verdicts are left out, and the reason counts them; when all are, the verdict is missing. The same
    answers give the same verdict in whatever order they came.

    Args:
        samples: how often each coach is asked; for one that draws its replies.
        reduce: `trimmed` is the mean without the lowest and the highest, from three scores on.
        max_spread: scores further apart than this, highest from lowest, disagree; None: they never do.
        on_disagreement: `keep` reduces them all the same; `reask` asks all once more and reduces what both rounds
            gave; `abstain` makes the verdict missing.
        budget_usd, budget_calls: caps over all its coaches together, beside their own; None is none.
    """

    name = "ensemble"

    def __init__(
        self,
        coaches: Sequence[Coach],
        *,
        samples: int = 1,
        reduce: Reduce = "mean",
        max_spread: float | None = None,
        on_disagreement: OnDisagreement = "keep",
        budget_usd: float | None = None,
        budget_calls: int | None = None,
    ) -> None:
        if not coaches or samples < 1:
            raise ConfigError(
                f"an ensemble of {len(coaches)} coaches and {samples} samples; allowed: 1 or more of each"
            )
        if reduce not in get_args(Reduce):
            raise ConfigError(f"coach.reduce is {reduce!r}; allowed: {', '.join(get_args(Reduce))}")
        if on_disagreement not in get_args(OnDisagreement):
            raise ConfigError(
                f"coach.on_disagreement is {on_disagreement!r}; allowed: {', '.join(get_args(OnDisagreement))}"
            )
        if on_disagreement != "keep" and max_spread is None:
            raise ConfigError(f"coach.on_disagreement={on_disagreement} needs coach.max_spread; it is null")
        self.parts = tuple(coaches) * samples
        self._reduce: Reduce = reduce
        self._max_spread = max_spread
        self._on_disagreement = on_disagreement
        share_budget(self, usd=budget_usd, calls=budget_calls)

    async def score(self, episode: Episode, index: int) -> Verdict:
        verdicts = await self._ask(episode, index)
        if self._on_disagreement == "reask" and self._disagree(verdicts):
            verdicts += await self._ask(episode, index)
        given = [(verdict.score, verdict) for verdict in verdicts if verdict.score is not None]
        if not given:
            reasons = sorted({verdict.reason for verdict in verdicts})
            missing = self._missing(f"none of {len(verdicts)} verdicts has a score: {'; '.join(reasons)}")
            return replace(missing, unjudgeable=unjudgeable(verdicts))
        scores = sorted(score for score, _ in given)
        shown = " ".join(f"{score:g}" for score in scores)
        spread = f"spread {scores[-1] - scores[0]:g} ({shown}), {len(verdicts) - len(given)} missing"
        if self._on_disagreement == "abstain" and self._disagree(verdicts):
            return self._missing(f"abstains, the coaches disagree: {spread}")
        joint = reduced(scores, self._reduce)
        raw = reduced([score if v.raw_score is None else v.raw_score for score, v in given], self._reduce)
        _, nearest = min((abs(score - joint), verdict.reason) for score, verdict in given)
        return Verdict(
            score=joint,
            reason=f"{self._reduce} of {len(given)}, {spread}; nearest: {nearest}",
            coach=self.name,
            raw_score=None if raw == joint else raw,
        )

    async def _ask(self, episode: Episode, index: int) -> list[Verdict]:
        return await verdicts_of([ask(coach, episode, index) for coach in self.parts])

    def _disagree(self, verdicts: Sequence[Verdict]) -> bool:
        scores = [verdict.score for verdict in verdicts if verdict.score is not None]
        return self._max_spread is not None and bool(scores) and max(scores) - min(scores) > self._max_spread

    def _missing(self, reason: str) -> Verdict:
        return Verdict(score=None, reason=reason, coach=self.name)


def reduced(scores: Sequence[float], how: Reduce) -> float:
    """One number for one or more; the same in any order."""
    if how == "median":
        return median(scores)
    return fmean(sorted(scores)[1:-1] if how == "trimmed" and len(scores) >= 3 else scores)
