"""What one agent's rollout step is reported as. A mean over nothing is left out, never a 0."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lightning_mappa.types import Experience, ExperienceBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What came of one mini-batch."""

    status: Literal["stepped", "skipped", "empty"]
    """`skipped`: loss or gradient was not finite. `empty`: no token had an advantage, so no step was due."""
    n_actions: int
    n_tokens: int
    loss: float = 0.0
    grad_norm: float = 0.0
    """Before clipping."""
    n_clipped: int = 0
    """Tokens whose loss a clip decided."""
    kl_sum: float = 0.0
    """Sum over tokens of old less new log-prob, before the step."""


def batch_metrics(batch: ExperienceBatch, entropy_BT: Tensor | None, trained: Sequence[int]) -> dict[str, float]:
    """Of the batch as it arrived and of its credit. `trained`: the rows that are not masked.

    How the agent acted is told of each who acts with its weights, as `<who>/score_mean`, where several do.
    """
    e = batch.experiences
    mask_BT = batch.response_mask_BT
    old_BT, ref_BT, advantages_BT = batch.old_log_probs_BT, batch.ref_log_probs_BT, batch.advantages_BT
    assert old_BT is not None
    assert advantages_BT is not None
    assert entropy_BT is not None
    metrics = {
        **_behaviour(e),
        "masked_rate": mean([1.0] * (len(e) - len(trained)) + [0.0] * len(trained)),
        "tokens": float(mask_BT[list(trained)].sum()),
        "kl_coef": batch.kl_coef,
    }
    if bool(mask_BT.any()):
        mismatch_N = (old_BT - batch.rollout_log_probs_BT)[mask_BT].double()
        metrics["mismatch/kl"] = -float(mismatch_N.mean())
        metrics["mismatch/ratio_max"] = float(mismatch_N.max().exp())
        metrics["mismatch/ratio_min"] = float(mismatch_N.min().exp())
        metrics["entropy"] = float(entropy_BT[mask_BT].mean())
        metrics["kl"] = 0.0 if ref_BT is None else float((old_BT - ref_BT)[mask_BT].double().mean())
    if trained:
        rows = list(trained)
        metrics["advantage_std"] = float(advantages_BT[rows][mask_BT[rows]].double().std(correction=0))
    return {name: value for name, value in metrics.items() if value is not None}


def _behaviour(experiences: Sequence[Experience]) -> dict[str, float | None]:
    figures: dict[str, float | None] = {}
    for who in dict.fromkeys(one.acted_as for one in experiences):
        own = [one for one in experiences if one.acted_as == who]
        prefix = f"{who}/" if who else ""
        figures |= {
            f"{prefix}response_length": mean(float(len(one.response_ids)) for one in own if one.response_ids),
            f"{prefix}truncation_rate": mean(float(one.truncated) for one in own),
            f"{prefix}score_mean": mean(one.score for one in own),
            f"{prefix}missing_verdict_rate": mean(float(one.score is None) for one in own),
        }
    return figures


def update_metrics(updates: Sequence[Update]) -> dict[str, float]:
    """Over the step's mini-batches; losses, norms and ratios only of those that stepped the optimizer."""
    stepped = [update for update in updates if update.status == "stepped"]
    tokens = sum(update.n_tokens for update in stepped)
    metrics = {
        "pg_loss": mean(update.loss for update in stepped),
        "grad_norm": mean(update.grad_norm for update in stepped),
        "pg_clipfrac": sum(update.n_clipped for update in stepped) / tokens if tokens else None,
        "ppo_kl": sum(update.kl_sum for update in stepped) / tokens if tokens else None,
        "skipped": float(sum(update.status == "skipped" for update in updates)),
        "empty": float(sum(update.status == "empty" for update in updates)),
        "skipped_actions": float(sum(u.n_actions for u in updates if u.status == "skipped")),
        "trained_actions": float(sum(u.n_actions for u in updates if u.status != "skipped")),
    }
    return {name: value for name, value in metrics.items() if value is not None}


def mean(values: Iterable[float | None]) -> float | None:
    """None for no values."""
    known = torch.tensor([value for value in values if value is not None], dtype=torch.float64)
    return float(known.mean()) if len(known) else None
