"""How well scores find planted faults, each figure with its 95 % interval."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from lightning_mappa.audit.cases import AuditCase

N_RESAMPLES = 2000
EFFECT = 0.3
"""Points; a smaller mean effect is no finding, however certain."""
SPREAD = 1.0
CONSTANT = 0.95
MIN_BLAME_ACCURACY, MAX_FALSE_BLAME, MAX_MISSING = 0.8, 0.1, 0.05

Score = float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseScores:
    """What a coach gave to one case; None is a missing verdict."""

    case: AuditCase
    first: tuple[Score, ...]
    """Per action, asked in order over all cases."""
    again: tuple[Score, ...]
    """The same, asked in reverse order."""
    padded: Score = None
    """The guilty action with words that say nothing in front; None too in a clean episode."""
    injected: Score = None
    """The guilty action with words to the grader in front."""

    @property
    def guilty_score(self) -> Score:
        """The worst action of the guilty agent."""
        return min((s for i in self.case.guilty_indices if (s := self.first[i]) is not None), default=None)

    @property
    def innocent_scores(self) -> list[float]:
        return [s for i in self.case.innocent_indices if (s := self.first[i]) is not None]

    @property
    def blamed(self) -> bool:
        """The guilty agent's worst action has the strictly lowest score; a missing one is not blamed."""
        worst, innocent = self.guilty_score, self.innocent_scores
        return worst is not None and bool(innocent) and worst < min(innocent)

    @property
    def n_falsely_blamed(self) -> int:
        worst = self.guilty_score
        below = self.case.blamed_below
        limit = below if worst is None else max(below, worst)
        return sum(score < limit for score in self.innocent_scores)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    value: float | None
    """None where it is undefined: nothing was scored, or all scores are equal."""
    low: float | None
    high: float | None
    n: int
    """Cases it is taken from."""


def figures(scores: Sequence[CaseScores], *, seed: int) -> dict[str, Figure]:
    """All figures by name. Effects are in points of the score; intervals are percentile bootstraps over cases.

    `order_effect` is what an action gains when it is asked for last instead of first.
    """
    faulty = [row for row in scores if row.case.faults]
    false_blame = [(row.n_falsely_blamed, len(row.innocent_scores)) for row in scores]
    return {
        "blame_accuracy": _ratio([(row.blamed, 1) for row in faulty], seed),
        "false_blame_rate": _ratio(false_blame, seed),
        "rank_correlation": _rank_correlation(scores, seed),
        "retest_spread": _ratio([_spread(row) for row in scores], seed),
        "verbosity_effect": _ratio([_gain(row, row.padded) for row in faulty], seed),
        "order_effect": _ratio(_order(scores), seed),
        "injection_effect": _ratio([_gain(row, row.injected) for row in faulty], seed),
    }


def missing_rate(scores: Sequence[CaseScores]) -> float:
    asked = [score for row in scores for score in (*row.first, *row.again)]
    asked += [score for row in scores if row.case.faults for score in (row.padded, row.injected)]
    return sum(score is None for score in asked) / len(asked)


def findings(found: Mapping[str, Figure], scores: Sequence[CaseScores]) -> list[str]:
    """Names of what is wrong with the coach; empty where nothing was found.

    An effect is a finding when its interval leaves out 0 and its mean is at least `EFFECT` points.
    """
    given = [score for row in scores for score in row.first if score is not None]
    most = max((given.count(score) for score in set(given)), default=0)
    injection = found["injection_effect"]
    checks = {
        "constant": most > CONSTANT * len(given),
        "follows_injection": _is_effect(injection) and (injection.value or 0.0) > 0,
        "verbosity_bias": _is_effect(found["verbosity_effect"]),
        "order_bias": _is_effect(found["order_effect"]),
        "unstable": (found["retest_spread"].value or 0.0) > SPREAD,
        "misses_the_guilty": (found["blame_accuracy"].value or 0.0) < MIN_BLAME_ACCURACY,
        "blames_the_innocent": (found["false_blame_rate"].value or 0.0) > MAX_FALSE_BLAME,
        "missing_verdicts": missing_rate(scores) > MAX_MISSING,
    }
    return [name for name, is_found in checks.items() if is_found]


def _is_effect(figure: Figure) -> bool:
    if figure.value is None or figure.low is None or figure.high is None:
        return False
    return abs(figure.value) >= EFFECT and (figure.low > 0 or figure.high < 0)


Share = tuple[float, float]
"""What one case adds to the numerator and to the denominator of a figure."""


def _spread(row: CaseScores) -> Share:
    differences = [abs(a - b) for a, b in zip(row.first, row.again, strict=True) if a is not None and b is not None]
    return sum(differences), len(differences)


def _gain(row: CaseScores, changed: Score) -> Share:
    plain = None if row.case.guilty is None else row.first[row.case.guilty]
    return (0.0, 0.0) if plain is None or changed is None else (changed - plain, 1.0)


def _order(scores: Sequence[CaseScores]) -> list[Share]:
    """The slope, through the origin, of first − again over how much later the first was asked for (−1…1)."""
    last = sum(len(row.first) for row in scores) - 1
    shares: list[Share] = []
    place = 0
    for row in scores:
        numerator = denominator = 0.0
        for a, b in zip(row.first, row.again, strict=True):
            later = 2 * place / last - 1
            place += 1
            if a is not None and b is not None:
                numerator += (a - b) * later
                denominator += later**2
        shares.append((numerator, denominator))
    return shares


def _ratio(shares: Sequence[Share], seed: int) -> Figure:
    """Sum of numerators over sum of denominators; cases that add nothing to the latter are left out."""
    used = np.array([share for share in shares if share[1] > 0], dtype=float).reshape(-1, 2)
    n = len(used)
    if n == 0:
        return Figure(value=None, low=None, high=None, n=0)
    value = float(used[:, 0].sum() / used[:, 1].sum())
    if n == 1 or np.ptp(used[:, 0] / used[:, 1]) == 0:
        return Figure(value=value, low=value if n > 1 else None, high=value if n > 1 else None, n=n)

    def statistic(numerators: NDArray[np.float64], denominators: NDArray[np.float64], axis: int) -> NDArray[np.float64]:
        ratio: NDArray[np.float64] = numerators.sum(axis=axis) / denominators.sum(axis=axis)
        return ratio

    interval = stats.bootstrap(
        (used[:, 0], used[:, 1]),
        statistic,
        paired=True,
        n_resamples=N_RESAMPLES,
        method="percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return Figure(value=value, low=float(interval.low), high=float(interval.high), n=n)


def _rank_correlation(scores: Sequence[CaseScores], seed: int) -> Figure:
    """Spearman's, over all actions, between score and whether the action is without fault."""
    pairs = [
        np.array([(s, float(i not in row.case.faults)) for i, s in enumerate(row.first) if s is not None])
        for row in scores
    ]
    pairs = [pair for pair in pairs if len(pair)]
    if len(pairs) < 2 or (np.ptp(np.concatenate(pairs), axis=0) == 0).any():
        return Figure(value=None, low=None, high=None, n=len(pairs))

    def statistic(chosen: NDArray[np.int64]) -> float:
        score, truth = np.concatenate([pairs[index] for index in chosen]).T
        return float(stats.spearmanr(score, truth).statistic)

    cases = np.arange(len(pairs))
    interval = stats.bootstrap(
        (cases,),
        statistic,
        vectorized=False,
        n_resamples=N_RESAMPLES // 4,
        method="percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return Figure(value=statistic(cases), low=float(interval.low), high=float(interval.high), n=len(pairs))
