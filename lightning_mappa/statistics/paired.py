"""Two systems on the same problems: the paired gain, its interval, and whether it could be chance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from lightning_mappa.statistics.intervals import N_RESAMPLES, Interval, bootstrap_mean

LEVEL = 0.05
"""A gain is called significant below it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedGain:
    """Means over the problems graded on both sides."""

    n: int
    """Problems graded on both sides."""
    n_ungraded: int
    before: float
    after: float
    gain: Interval
    """After minus before, with the bootstrap interval over problems."""
    p_value: float
    """Two-sided permutation test: per problem, before and after change places at random."""

    @property
    def significant(self) -> bool:
        """By the permutation test. One test alone: with several, correct their p-values by `holm` first."""
        return self.p_value < LEVEL


def paired(
    before: Mapping[str, Sequence[float]],
    after: Mapping[str, Sequence[float]],
    *,
    seed: int,
    n_resamples: int = N_RESAMPLES,
) -> PairedGain:
    """Both map problem → outcomes of its samples (0…1).

    Problems without a graded sample on either side are left out of all figures and counted. What it says is
    of other problems of the kind with these weights; it does not cover other training seeds.

    Raises `ValueError` when the two hold different problems, or none that is graded on both sides.
    """
    if before.keys() != after.keys():
        raise ValueError("before and after were measured on different problems")
    # Sorted, so that nothing depends on the order of arrival.
    graded = [problem for problem in sorted(before) if before[problem] and after[problem]]
    if not graded:
        raise ValueError("no problem was graded on both sides")
    means_before = np.array([fmean(before[problem]) for problem in graded])
    means_after = np.array([fmean(after[problem]) for problem in graded])
    return PairedGain(
        n=len(graded),
        n_ungraded=len(before) - len(graded),
        before=float(means_before.mean()),
        after=float(means_after.mean()),
        gain=bootstrap_mean(means_after - means_before, seed=seed, n_resamples=n_resamples),
        p_value=permutation_p(means_before, means_after, seed=seed, n_resamples=n_resamples),
    )


def paired_gain(
    initial: Mapping[str, Sequence[float]],
    selected: Mapping[str, Sequence[float]],
    *,
    seed: int,
    n_resamples: int = N_RESAMPLES,
) -> dict[str, Any]:
    """`paired` as it stands in test.json."""
    found = paired(initial, selected, seed=seed, n_resamples=n_resamples)
    return {
        "n": found.n,
        "n_ungraded": found.n_ungraded,
        "initial": found.before,
        "selected": found.after,
        "gain": found.gain.value,
        "gain_ci": [found.gain.low, found.gain.high],
        "p_value": found.p_value,
        "significant": found.significant,
    }


def permutation_p(
    before: NDArray[np.float64], after: NDArray[np.float64], *, seed: int, n_resamples: int = N_RESAMPLES
) -> float:
    """Two-sided p-value of the mean difference under exchange within pairs; exact where 2^n ≤ `n_resamples`."""
    difference = after - before
    difference = difference[difference != 0]  # ties say nothing, and would only cost resamples
    if len(difference) < 2:
        return 1.0  # of one difference, both signs are as extreme
    found = stats.permutation_test(
        (difference,),
        lambda d, axis: np.mean(d, axis=axis),
        permutation_type="samples",
        vectorized=True,
        batch=1000,
        n_resamples=n_resamples,
        alternative="two-sided",
        rng=np.random.default_rng(seed),
    )
    return float(found.pvalue)


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Holm's adjusted p-values, which may be compared with one level whatever the number of tests.

    The i-th smallest of m (from 0) is multiplied by m − i, made monotone, and cut at 1.
    """
    adjusted: dict[str, float] = {}
    largest = 0.0
    for rank, name in enumerate(sorted(p_values, key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[name]))
        adjusted[name] = largest
    return {name: adjusted[name] for name in p_values}


def fisher_p(right_before: int, n_before: int, right_after: int, n_after: int) -> float:
    """Two-sided exact p-value of two proportions of independent trials.

    For figures of which only counts are known: it ignores pairing, and takes samples of one problem for
    independent.
    """
    table = [[right_before, n_before - right_before], [right_after, n_after - right_after]]
    return float(stats.fisher_exact(table).pvalue)
