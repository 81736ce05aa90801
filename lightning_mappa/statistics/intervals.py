"""How far a single figure can be trusted: over problems, over samples, over training seeds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
from numpy.typing import NDArray
from scipy import stats

CONFIDENCE = 0.95
N_RESAMPLES = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A figure with its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"

    def excludes(self, value: float) -> bool:
        return not self.low <= value <= self.high


def wilson(right: int, n: int) -> Interval:
    """Wilson score interval of a proportion of *independent* trials.

    Several samples of one problem are not independent: use `cluster_bootstrap` for them. Raises `ValueError`
    without a trial.
    """
    if not 0 <= right <= n or n < 1:
        raise ValueError(f"{right} of {n} is no proportion")
    found = stats.binomtest(right, n).proportion_ci(CONFIDENCE, method="wilson")
    return Interval(value=right / n, low=float(found.low), high=float(found.high))


def cluster_bootstrap(
    outcomes: Mapping[str, Sequence[float]],
    *,
    seed: int,
    n_resamples: int = N_RESAMPLES,
    statistic: Callable[[Sequence[float]], float] = fmean,
) -> Interval:
    """Percentile interval of the mean over problems of `statistic` of a problem's samples.

    Whole problems are drawn, with all their samples: it says what other problems of the kind would give, and
    is several times wider than one that takes samples for independent. Problems without samples are left out.
    Raises `ValueError` where none is left.
    """
    values = np.array([statistic(samples) for samples in outcomes.values() if samples])
    return bootstrap_mean(values, seed=seed, n_resamples=n_resamples)


def bootstrap_mean(values: NDArray[np.float64], *, seed: int, n_resamples: int = N_RESAMPLES) -> Interval:
    """Percentile bootstrap interval of the mean of independent values. Raises `ValueError` without any.

    Of a single value, or of equal ones, it has no width: it then says nothing of other problems.
    """
    if len(values) == 0:
        raise ValueError("no value to take the mean of")
    # In one order, so that the interval does not depend on that of the problems.
    values = np.sort(values)
    mean = float(values.mean())
    if np.ptp(values) == 0:
        return Interval(value=mean, low=mean, high=mean)
    found = stats.bootstrap(
        (values,),
        np.mean,
        confidence_level=CONFIDENCE,
        n_resamples=n_resamples,
        method="percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return Interval(value=mean, low=float(found.low), high=float(found.high))


def t_interval(values: Sequence[float]) -> Interval | None:
    """Student's interval of the mean over training seeds, one value per seed; None below two seeds."""
    if len(values) < 2:
        return None
    mean = fmean(values)
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, len(values) - 1) * stats.sem(values))
    return Interval(value=mean, low=mean - half, high=mean + half)


@dataclass(frozen=True, slots=True, kw_only=True)
class StandardErrors:
    """Three answers to "how far off is the mean success?", for three questions."""

    naive: float
    """As if all samples were independent: √(p(1-p)/n). Right for no question; for comparison."""
    sampling: float
    """Drawing new samples of *these* problems: how this benchmark would come out again."""
    problems: float
    """Drawing new problems of the kind, with as many samples each."""


def standard_errors(outcomes: Mapping[str, Sequence[float]]) -> StandardErrors:
    """Of the mean over problems. Needs two problems, and for `sampling` two samples of each (else nan)."""
    groups = [list(samples) for samples in outcomes.values() if samples]
    if len(groups) < 2:
        raise ValueError(f"{len(groups)} problems have samples: needs at least 2")
    means = [fmean(group) for group in groups]
    p, n = fmean(means), sum(map(len, groups))
    if all(len(group) > 1 for group in groups):
        sampling = math.sqrt(sum(float(np.var(group, ddof=1)) / len(group) for group in groups)) / len(groups)
    else:
        sampling = math.nan
    return StandardErrors(
        naive=math.sqrt(p * (1 - p) / n),
        sampling=sampling,
        problems=float(stats.sem(means)),
    )
