"""Scores on one scale, for a coach that is milder with some actions than with others."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_mappa.algorithm.rewards import SCORE_RANGE
from lightning_mappa.coaches.base import Coach, ask, rescored
from lightning_mappa.errors import ConfigError
from lightning_mappa.types import Episode, Verdict

FIELDS = ("agent", "role", "kind", "turn", "outcome")
Group = tuple[str, ...]
NO_SPREAD = 1e-6
"""Variance of scores below which a group is constant but for rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """Sums over scores, of which older ones may weigh less."""

    count: float = 0.0
    total: float = 0.0
    squares: float = 0.0

    @property
    def mean(self) -> float:
        return self.total / self.count

    @property
    def variance(self) -> float:
        return max(0.0, self.squares / self.count - self.mean**2)

    def then(self, scores: Sequence[float], decay: float) -> Moments:
        """With what is known weighed by `decay` and `scores` added; their order is of no matter."""
        return Moments(
            count=decay * self.count + len(scores),
            total=decay * self.total + math.fsum(scores),
            squares=decay * self.squares + math.fsum(score * score for score in scores),
        )


class CalibratedCoach:
    """A `StatefulCoach` that takes from `coach` what it gives a whole group of actions, whatever they did.

    A score s of group g becomes (s − mu_g) · sigma / sigma_g + mu, clamped to 0 … 10: mu_g and sigma_g are mean and
    spread of the group's own scores, mu is the mean over the groups that share the fields `within`, sigma the spread
    inside those groups. `Verdict.raw_score` is what the coach gave. Differences inside a group stay, and so do those
    between values of `within`: group by what the coach should not care about, and put into `within` what it should.
    With `outcome` in it, kinds are compared among episodes that ended alike, as the verifier in code has them: a kind
    that fails more often in truth keeps its lower scores. What the outcome does not tell, it loses.

    Statistics are of the coach's own scores, and take in a batch when it has ended: all verdicts of a batch are
    corrected alike, in whatever order they come.

    Args:
        group_by, within: of `agent`, `role`, `kind` (of task), `turn` and `outcome` (right from a half on, wrong or
            unknown), for which every verdict waits; `within` is a part of `group_by`.
        min_count: scores that a group must have for its own to be corrected, and to count in what others are corrected
            by; older scores count as `decay` says.
        shrinkage: scores that `mu` and `sigma` count for in a group's statistics, so that few scores move little;
            and a group of n scores counts n / (n + shrinkage) in `mu`.
        decay: what a score weighs one batch later; 1 forgets nothing.
        max_stretch: sigma / sigma_g is kept from 1 / max_stretch to max_stretch.
    """

    def __init__(
        self,
        coach: Coach,
        *,
        group_by: Sequence[str] = ("role", "kind", "turn"),
        within: Sequence[str] = ("role",),
        min_count: int = 16,
        shrinkage: float = 8.0,
        decay: float = 0.98,
        max_stretch: float = 2.0,
    ) -> None:
        unknown = [field for field in group_by if field not in FIELDS]
        if unknown or not set(within) <= set(group_by):
            raise ConfigError(
                f"coach.group_by is {list(group_by)} and coach.within {list(within)}; "
                f"allowed: some of {', '.join(FIELDS)}, and in within some of group_by"
            )
        if min_count < 1 or shrinkage < 0 or not 0 < decay <= 1 or max_stretch < 1:
            raise ConfigError(
                f"coach has min_count={min_count}, shrinkage={shrinkage}, decay={decay}, max_stretch={max_stretch}; "
                "allowed: at least 1, at least 0, above 0 to 1, at least 1"
            )
        self.name = coach.name
        self.parts = (coach,)
        self.needs_outcome = True if "outcome" in group_by else None
        """None: as the coach does."""
        self._group_by = tuple(group_by)
        self._within = tuple(group_by.index(field) for field in within)
        self._min_count = min_count
        self._shrinkage = shrinkage
        self._decay = decay
        self._max_stretch = max_stretch
        self._moments: dict[Group, Moments] = {}
        self._batch: list[tuple[Group, float]] = []

    async def score(self, episode: Episode, index: int) -> Verdict:
        verdict = await ask(self.parts[0], episode, index)
        if verdict.score is None:
            return verdict
        group = self._group(episode, index)
        self._batch.append((group, verdict.score))
        score = self._corrected(group, verdict.score)
        if score == verdict.score:
            return verdict
        return rescored(verdict, score, f"{verdict.score:g} calibrated to {score:.2f}: {verdict.reason}")

    def end_of_batch(self) -> None:
        scores: defaultdict[Group, list[float]] = defaultdict(list)
        for group, score in self._batch:
            scores[group].append(score)
        self._batch.clear()
        groups = sorted(self._moments.keys() | scores.keys())
        self._moments = {g: self._moments.get(g, Moments()).then(scores[g], self._decay) for g in groups}

    def state_dict(self) -> dict[str, Any]:
        """Of the batches that have ended."""
        return {"groups": [[list(group), m.count, m.total, m.squares] for group, m in self._moments.items()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._batch.clear()
        self._moments = {
            tuple(group): Moments(count=count, total=total, squares=squares)
            for group, count, total, squares in state["groups"]
        }

    def _group(self, episode: Episode, index: int) -> Group:
        action = episode.actions[index]
        fields = {
            "agent": action.agent_id,
            "role": action.role,
            "kind": episode.task.kind,
            "turn": str(action.turn),
            "outcome": "unknown" if episode.outcome is None else "right" if episode.outcome >= 0.5 else "wrong",
        }
        return tuple(fields[field] for field in self._group_by)

    def _corrected(self, group: Group, score: float) -> float:
        own = self._moments.get(group)
        if own is None or own.count < self._min_count:
            return score
        known = [(other, moments) for other, moments in self._moments.items() if moments.count >= self._min_count]
        alike = [moments for other, moments in known if all(other[f] == group[f] for f in self._within)]
        mean, variance = pooled(alike, self._shrinkage)
        weight = own.count / (own.count + self._shrinkage)
        own_mean = weight * own.mean + (1 - weight) * mean
        own_variance = weight * own.variance + (1 - weight) * variance
        stretch = math.sqrt(variance / own_variance) if min(variance, own_variance) > NO_SPREAD else 1.0
        stretch = min(max(stretch, 1 / self._max_stretch), self._max_stretch)
        return min(max((score - own_mean) * stretch + mean, 0.0), SCORE_RANGE)


def pooled(groups: Iterable[Moments], shrinkage: float = 0.0) -> tuple[float, float]:
    """The mean of the groups' means, and the variance inside the groups: what sets one off from another is in neither.

    A group counts as one however many scores it has, so that a bias of one kind moves the mean by the same amount
    where that kind is frequent and where it is rare; with `shrinkage` one of n scores counts n / (n + shrinkage).
    """
    known = [moments for moments in groups if moments.count > 0]
    weights = [moments.count / (moments.count + shrinkage) for moments in known]
    mean = math.fsum(w * moments.mean for w, moments in zip(weights, known, strict=True)) / math.fsum(weights)
    count = math.fsum(moments.count for moments in known)
    return mean, math.fsum(moments.count * moments.variance for moments in known) / count
