"""Figures of an audit with their 95 % intervals, in which cases of one template are not taken for independent."""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from lightning_mappa.audit.scores import CaseScores
from lightning_mappa.statistics.intervals import CONFIDENCE

N_RESAMPLES = 2000
MAX_UNDEFINED = 0.05
"""Share of resamples that may be left out because they have no value; the rest is no sample of the figure otherwise."""

T = TypeVar("T")

Share = tuple[CaseScores, float, float]
"""A case, and what it adds to the numerator and to the denominator of a figure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    value: float | None
    """None where it is undefined: nothing was scored, or all scores are equal."""
    low: float | None
    """None, as `high`, where `interval` says why there is none."""
    high: float | None
    n: int
    """Cases it is taken from."""
    interval: str
    """How it was made."""


NO_INTERVAL = "none: fewer than two cases"
CONSTANT_INTERVAL = "no width: the same in every case"
UNDEFINED_INTERVAL = "none: all scores are equal in too many resamples"
BOOTSTRAP = "percentile bootstrap over cases, or over templates where that is wider"


def wilson(share: float, n: float) -> tuple[float, float]:
    """Wilson's 95 % interval of a share of `n` trials, which may be an effective number and so no whole one."""
    z2 = float(stats.norm.ppf((1 + CONFIDENCE) / 2)) ** 2
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = math.sqrt(z2 * (share * (1 - share) / n + z2 / (4 * n * n))) / (1 + z2 / n)
    return max(0.0, centre - half), min(1.0, centre + half)


def share_figure(shares: Sequence[Share]) -> Figure:
    """Of parts that are 0 or 1, several of which a case may have."""
    used = [share for share in shares if share[2] > 0]
    if not used:
        return _undefined(0)
    value = sum(share[1] for share in used) / sum(share[2] for share in used)
    n = _effective(used, value)
    low, high = wilson(value, n)
    how = "Wilson" if n == len(used) else f"Wilson, {len(used)} cases worth {n:.1f}, since templates differ"
    return Figure(value=value, low=low, high=high, n=len(used), interval=how)


def _effective(used: Sequence[Share], value: float) -> float:
    """Independent cases that would give the variance which sums per template have; not more than there are."""
    groups = _summed(used)
    total = sum(share[2] for share in used)
    squares = sum((numerator - value * denominator) ** 2 for numerator, denominator in groups)
    variance = squares / total**2 * len(groups) / max(len(groups) - 1, 1)
    return min(float(len(used)), value * (1 - value) / variance) if variance > 0 else float(len(used))


def _summed(shares: Sequence[Share]) -> list[tuple[float, float]]:
    """Numerator and denominator per template."""
    groups = grouped((row.case.template, (numerator, denominator)) for row, numerator, denominator in shares)
    return [(math.fsum(a for a, _ in parts), math.fsum(b for _, b in parts)) for parts in groups.values()]


def ratio_figure(shares: Sequence[Share], seed: int) -> Figure:
    """Sum of numerators over sum of denominators; cases that add nothing to the latter are left out."""
    used = [share for share in shares if share[2] > 0]
    if not used:
        return _undefined(0)
    parts = np.array([share[1:] for share in used], dtype=float)
    value = float(parts[:, 0].sum() / parts[:, 1].sum())
    if len(used) == 1:
        return Figure(value=value, low=None, high=None, n=1, interval=NO_INTERVAL)
    if np.ptp(parts[:, 0] / parts[:, 1]) == 0:
        return Figure(value=value, low=value, high=value, n=len(used), interval=CONSTANT_INTERVAL)
    low, high = _wider(_of_ratio(parts, seed), _of_ratio(np.array(_summed(used)), seed))
    return Figure(value=value, low=low, high=high, n=len(used), interval=BOOTSTRAP)


def _of_ratio(parts: NDArray[np.float64], seed: int) -> tuple[float, float] | None:
    def statistic(numerators: NDArray[np.float64], denominators: NDArray[np.float64], axis: int) -> NDArray[np.float64]:
        ratio: NDArray[np.float64] = numerators.sum(axis=axis) / denominators.sum(axis=axis)
        return ratio

    if len(parts) < 2 or np.ptp(parts[:, 0] / parts[:, 1]) == 0:
        return None
    interval = stats.bootstrap(
        (parts[:, 0], parts[:, 1]),
        statistic,
        paired=True,
        n_resamples=N_RESAMPLES,
        method="percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return float(interval.low), float(interval.high)


def _wider(*intervals: tuple[float, float] | None) -> tuple[float, float]:
    known = [interval for interval in intervals if interval is not None]
    return max(known, key=lambda interval: interval[1] - interval[0])


def rank_correlation(scores: Sequence[CaseScores], seed: int) -> Figure:
    """Spearman's, over all actions, between score and whether the action is without fault."""
    pairs = [
        (row, np.array([(s, float(i not in row.case.faults)) for i, s in enumerate(row.first) if s is not None]))
        for row in scores
    ]
    pairs = [(row, pair) for row, pair in pairs if len(pair)]
    if len(pairs) < 2 or (np.ptp(np.concatenate([pair for _, pair in pairs]), axis=0) == 0).any():
        return _undefined(len(pairs))
    cases = [pair for _, pair in pairs]
    templates = [np.concatenate(group) for group in grouped((row.case.template, pair) for row, pair in pairs).values()]
    intervals = [_of_spearman(groups, seed) for groups in (cases, templates) if len(groups) > 1]
    value = _spearman(cases)
    if None in intervals:
        return Figure(value=value, low=None, high=None, n=len(pairs), interval=UNDEFINED_INTERVAL)
    low, high = _wider(*intervals)
    return Figure(value=value, low=low, high=high, n=len(pairs), interval=BOOTSTRAP)


def _of_spearman(groups: Sequence[NDArray[np.float64]], seed: int) -> tuple[float, float] | None:
    """None where too few resamples have a correlation."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", stats.DegenerateDataWarning)  # of scipy's interval, which is not taken
        found = stats.bootstrap(
            (np.arange(len(groups)),),
            lambda chosen: _spearman([groups[index] for index in chosen]),
            vectorized=False,
            n_resamples=N_RESAMPLES // 4,
            method="percentile",
            rng=np.random.default_rng(seed),
        ).bootstrap_distribution
    defined = found[~np.isnan(found)]
    if len(defined) < (1 - MAX_UNDEFINED) * len(found):
        return None
    low, high = np.quantile(defined, ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2))
    return float(low), float(high)


def _spearman(groups: Sequence[NDArray[np.float64]]) -> float:
    """NaN where the scores, or the truth, are all the same."""
    score, truth = np.concatenate(groups).T
    if np.ptp(score) == 0 or np.ptp(truth) == 0:
        return math.nan
    return float(stats.spearmanr(score, truth).statistic)


def _undefined(n: int) -> Figure:
    return Figure(value=None, low=None, high=None, n=n, interval=NO_INTERVAL)


def grouped(pairs: Iterable[tuple[str, T]]) -> dict[str, list[T]]:
    groups: defaultdict[str, list[T]] = defaultdict(list)
    for name, entry in pairs:
        groups[name].append(entry)
    return dict(groups)
