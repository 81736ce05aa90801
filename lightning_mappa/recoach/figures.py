"""How two sets of verdicts, and the advantages made of them, differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np
from scipy import stats

from lightning_mappa.types import ActionKey, Verdict

N_LARGEST = 5
"""Disagreements that are shown one by one."""


def verdict_figures(
    keys: Sequence[ActionKey], recorded: Mapping[ActionKey, Verdict], new: Mapping[ActionKey, Verdict]
) -> dict[str, Any]:
    """JSON-able, of one agent's actions. Means and correlations are over the actions that have both scores.

    `mean_difference` is new − recorded, in points of the score. A correlation is None where one side is constant.
    """
    both = [(key, a, b) for key in keys if (a := recorded[key].score) is not None and (b := new[key].score) is not None]
    old_scores, new_scores = [a for _, a, _ in both], [b for _, _, b in both]
    largest = sorted(both, key=lambda entry: -abs(entry[2] - entry[1]))[:N_LARGEST]
    return {
        "actions": len(keys),
        "n": len(both),
        "missing": {
            "recorded": sum(recorded[key].score is None for key in keys),
            "new": sum(new[key].score is None for key in keys),
        },
        "mean": {"recorded": _mean(old_scores), "new": _mean(new_scores)},
        "mean_difference": _mean([b - a for _, a, b in both]),
        "mean_absolute_difference": _mean([abs(b - a) for _, a, b in both]),
        **correlations(old_scores, new_scores),
        "largest": [
            {
                "episode_id": key[0],
                "index": key[1],
                "recorded": a,
                "new": b,
                "reason_recorded": recorded[key].reason,
                "reason_new": new[key].reason,
            }
            for key, a, b in largest
            if a != b
        ],
    }


def advantage_figures(
    keys: Sequence[ActionKey],
    recorded: Mapping[ActionKey, float | None],
    new: Mapping[ActionKey, float | None],
) -> dict[str, Any]:
    """JSON-able, of one agent's actions. `sign_flips` is a share of the actions that both sides train on."""
    both = [(a, b) for key in keys if (a := recorded.get(key)) is not None and (b := new.get(key)) is not None]
    return {
        "n": len(both),
        "masked": {
            "recorded": sum(recorded.get(key) is None for key in keys),
            "new": sum(new.get(key) is None for key in keys),
        },
        "sign_flips": _mean([float(a * b < 0) for a, b in both]),
        **correlations([a for a, _ in both], [b for _, b in both]),
    }


def correlations(first: Sequence[float], second: Sequence[float]) -> dict[str, float | None]:
    """Pearson's and Spearman's; None for fewer than two pairs, and where one side is constant."""
    if len(first) < 2 or np.ptp(first) == 0 or np.ptp(second) == 0:
        return {"pearson": None, "spearman": None}
    return {
        "pearson": float(stats.pearsonr(first, second).statistic),
        "spearman": float(stats.spearmanr(first, second).statistic),
    }


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None
