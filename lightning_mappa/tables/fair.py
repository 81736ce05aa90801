"""Means over all runs, in which a failed run counts as a guess and is not left out.

Without that, a team that hands in only what it is sure of looks better the more often it fails.

A failed run is one whose hand-in is refused or not there, also because an agent ran out of turns, of tokens or of the
time that its programs have. A run that was cut is none: by the deadline of an episode, which stands for a machine that
hangs (programs and turns have limits of their own), by a lost engine, by a sandbox that did not start a program. It is
not graded, has no `fair/…`, and is counted in `ungraded`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, median
from typing import Any, Literal

from lightning_mappa.tables.scoring import Answers, Score

Fair = Literal["paper", "chance"]
FAIR: tuple[Fair, ...] = ("paper", "chance")

_PAPER = {"accuracy": 0.5, "f1": 0.0, "mae_percent": 50.0, "rmse_percent": 50.0, "jaccard": 0.0}
_NAMES = {
    "classification": ("accuracy", "f1"),
    "regression": ("mae_percent", "rmse_percent"),
    "text": ("jaccard",),
}


def fair_metrics(score: Score, answers: Answers, mode: Fair) -> dict[str, float]:
    """`fair/…` of one run: its own metrics when it is valid, else those of a guess; undefined ones left out.

    `paper` is the published convention: accuracy 0.5, F1 0, MAE and RMSE 50 % of the target's range. `chance` is
    the task's own: a class drawn blindly, and for numbers the mean (RMSE) or median (MAE) of the truth.
    """
    if score.valid:
        found = score.metrics
    else:
        found = _PAPER if mode == "paper" else chance_level(answers)
    return {f"fair/{name}": found[name] for name in _NAMES[answers.spec.kind] if name in found}


def chance_level(answers: Answers) -> dict[str, float]:
    """What a blind guess comes to, on average over targets."""
    if answers.spec.kind == "text":
        return {"jaccard": 0.0}
    columns = list(zip(answers.truth, answers.labels, strict=True))
    if answers.spec.kind == "regression":
        levels = [_constant(truth) for truth, _ in columns]
    elif len(columns) > 1 and answers.spec.metric == "log_loss":  # the columns are the classes
        right = [row.index(1) for row in zip(*answers.truth, strict=True)]
        levels = [_blind(right, len(columns))]
    else:
        levels = [_blind(truth, len(labels)) for truth, labels in columns]
    return {name: fmean(level[name] for level in levels) for name in levels[0]}


def _blind(truth: Sequence[Any], n_classes: int) -> dict[str, float]:
    """Each class with the same probability: its recall is 1 / n and its precision how often it is true.

    F1 of two classes is that of the second, of more the mean weighted by how often they are true.
    """
    recall = 1 / n_classes
    shares = [sum(t == place for t in truth) / len(truth) for place in range(n_classes)]
    f1 = [2 * share * recall / (share + recall) for share in shares]
    weighted = math.fsum(share * value for share, value in zip(shares, f1, strict=True))
    return {"accuracy": recall, "f1": f1[1] if n_classes == 2 else weighted}


def _constant(truth: Sequence[float]) -> dict[str, float]:
    spread = max(truth) - min(truth)
    if not spread:
        return {"mae_percent": 0.0, "rmse_percent": 0.0}
    mean, middle = fmean(truth), median(truth)
    rmse = math.sqrt(fmean((t - mean) ** 2 for t in truth))
    mae = fmean(abs(t - middle) for t in truth)
    return {"mae_percent": 100 * mae / spread, "rmse_percent": 100 * rmse / spread}
