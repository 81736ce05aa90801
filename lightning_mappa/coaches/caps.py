"""Scores that what came out of the task holds down, whatever the coach says of the work."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from lightning_mappa.algorithm.rewards import SCORE_RANGE
from lightning_mappa.coaches.base import Coach, ask, rescored
from lightning_mappa.errors import ConfigError
from lightning_mappa.types import Episode, Verdict

EpisodeMetrics = Callable[[Episode], Mapping[str, float]]
"""Names and values of what was measured at the end of an episode; no name for what was not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskMetrics:
    """`EpisodeMetrics` as the episode's task has them in its metadata under `key`; none where it has no such key."""

    key: str = "metrics"

    def __call__(self, episode: Episode) -> Mapping[str, float]:
        found: Mapping[str, float] = episode.task.metadata.get(self.key, {})
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class GradedMetrics:
    """`EpisodeMetrics` as the episode was graded with."""

    def __call__(self, episode: Episode) -> Mapping[str, float]:
        return episode.metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """Values within all the limits that are given may score at most `cap`."""

    cap: float
    at_least: float = -math.inf
    below: float = math.inf
    up_to: float = math.inf

    def __post_init__(self) -> None:
        if not 0 <= self.cap <= SCORE_RANGE:
            raise ConfigError(f"cap of a band is {self.cap}; allowed: 0 to {SCORE_RANGE:g}")

    def holds(self, value: float) -> bool:
        return self.at_least <= value < self.below and value <= self.up_to


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricCap:
    """What a score may be at most, by the first band that a metric is in.

    With several of the metrics known, the kindest of their caps holds. A value that is not finite, or in no band,
    caps nothing.
    """

    metrics: Sequence[str]
    bands: Sequence[Band]
    agents: Sequence[str] | None = None
    """Agent ids it is for; None: the agent of the episode's last action."""

    def cap(self, measured: Mapping[str, float]) -> tuple[float, str] | None:
        """The cap and the metric behind it."""
        caps = [
            (band.cap, f"{name} {measured[name]:g}")
            for name in self.metrics
            if math.isfinite(measured.get(name, math.nan))
            for band in [next((band for band in self.bands if band.holds(measured[name])), None)]
            if band is not None
        ]
        return max(caps, key=lambda cap: cap[0], default=None)

    def concerns(self, episode: Episode, index: int) -> bool:
        agents = self.agents if self.agents is not None else (episode.actions[-1].agent_id,)
        return episode.actions[index].agent_id in agents


CLASSIFICATION = MetricCap(
    metrics=("roc_auc", "accuracy"),
    bands=(
        Band(at_least=0.85, cap=9),
        Band(at_least=0.75, cap=8),
        Band(at_least=0.65, cap=6),
        Band(at_least=0.55, cap=4),
        Band(cap=3),
    ),
)
"""Both metrics are shares from 0 to 1."""

REGRESSION = MetricCap(
    metrics=("rmse_percent",),
    bands=(Band(below=10, cap=9), Band(up_to=25, cap=8), Band(up_to=50, cap=6), Band(cap=4)),
)
"""Root mean squared error in percent of the range of the true values."""


def table_caps(analyst: str = "analyst", modeler: str = "modeler", engineer: str = "engineer") -> tuple[MetricCap, ...]:
    """The published bands for a team on tables: the Analyst's by how good the predictions are, and for those before
    it a limit (Modeler 5, Data Engineer 6) where they are next to random: below 0.55, or an error above 50 %."""
    caps = [replace(rule, agents=(analyst,)) for rule in (CLASSIFICATION, REGRESSION)]
    for agent, cap in ((modeler, 5), (engineer, 6)):
        useful = (Band(at_least=0.55, cap=SCORE_RANGE), Band(cap=cap))
        caps.append(MetricCap(metrics=CLASSIFICATION.metrics, bands=useful, agents=(agent,)))
        useful = (Band(up_to=50, cap=SCORE_RANGE), Band(cap=cap))
        caps.append(MetricCap(metrics=REGRESSION.metrics, bands=useful, agents=(agent,)))
    return tuple(caps)


class CappedCoach:
    """A `Coach` whose scores end at what the episode's metrics allow.

    The lowest of the `caps` that concern an action holds; where nothing was measured, the score stays. Missing
    verdicts stay missing. `Verdict.raw_score` is what the coach itself gave.

    Args:
        metrics: measured at the end of an episode.
    """

    needs_outcome = True

    def __init__(
        self,
        coach: Coach,
        caps: Sequence[MetricCap] = (CLASSIFICATION, REGRESSION),
        *,
        metrics: EpisodeMetrics | None = None,
    ) -> None:
        self.name = coach.name
        self.parts = (coach,)
        self._caps = tuple(caps)
        self._metrics = TaskMetrics() if metrics is None else metrics

    async def score(self, episode: Episode, index: int) -> Verdict:
        verdict = await ask(self.parts[0], episode, index)
        if verdict.score is None:
            return verdict
        measured = self._metrics(episode)
        caps = [cap for rule in self._caps if rule.concerns(episode, index) and (cap := rule.cap(measured))]
        lowest, metric = min(caps, key=lambda cap: cap[0], default=(SCORE_RANGE, ""))
        if verdict.score <= lowest:
            return verdict
        return rescored(verdict, lowest, f"capped at {lowest:g} for {metric}: {verdict.reason}")
