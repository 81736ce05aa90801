"""Before and after on the same problems: the paired gain and its interval."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np
from scipy import stats


def paired_gain(
    initial: Mapping[str, Sequence[float]],
    selected: Mapping[str, Sequence[float]],
    *,
    seed: int,
    n_resamples: int = 10_000,
) -> dict[str, Any]:
    """Mean success before and after, their difference, and its 95 % percentile bootstrap interval over problems.

    Both map problem → outcomes of its samples (0…1). Problems without a graded sample on either side are left
    out of all figures and counted in `n_ungraded`. The interval says what other problems of the kind would
    give with these weights; it does not cover other training seeds.

    Raises `ValueError` when the two hold different problems, or none that is graded on both sides.
    """
    if initial.keys() != selected.keys():
        raise ValueError("initial and selected were measured on different problems")
    graded = [problem for problem in initial if initial[problem] and selected[problem]]
    if not graded:
        raise ValueError("no problem was graded on both sides")
    before = np.array([fmean(initial[problem]) for problem in graded])
    after = np.array([fmean(selected[problem]) for problem in graded])
    difference = after - before
    if np.ptp(difference) == 0:
        low = high = float(difference[0])
    else:
        interval = stats.bootstrap(
            (difference,),
            np.mean,
            confidence_level=0.95,
            n_resamples=n_resamples,
            method="percentile",
            rng=np.random.default_rng(seed),
        ).confidence_interval
        low, high = float(interval.low), float(interval.high)
    return {
        "n": len(graded),
        "n_ungraded": len(initial) - len(graded),
        "initial": float(before.mean()),
        "selected": float(after.mean()),
        "gain": float(difference.mean()),
        "gain_ci": [low, high],
    }
