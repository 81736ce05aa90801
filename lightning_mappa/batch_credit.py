"""Between a batch's tensors and the credit that is formed over all agents."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_mappa.algorithm.advantages import (
    ActionCredit,
    ActionStats,
    action_stats,
    suffix_kl,
    token_advantages,
)
from lightning_mappa.types import ActionKey, ExperienceBatch


def kl_to_reference(batch: ExperienceBatch) -> Tensor:
    """k1 per token, [B, T]; 0 without a reference."""
    assert batch.old_log_probs_BT is not None
    if batch.ref_log_probs_BT is None:
        return torch.zeros_like(batch.old_log_probs_BT)
    return batch.old_log_probs_BT - batch.ref_log_probs_BT


def finite_stats(batch: ExperienceBatch) -> dict[ActionKey, ActionStats]:
    """KL sums of the actions that have a response, all of whose log-probs are finite."""
    assert batch.old_log_probs_BT is not None
    kl_BT = kl_to_reference(batch)
    finite_B = (kl_BT.isfinite() & batch.old_log_probs_BT.isfinite()).all(1).tolist()
    stats = action_stats(kl_BT, batch.response_mask_BT)
    return {e.key: s for e, s, ok in zip(batch, stats, finite_B, strict=True) if ok and s.n_tokens}


def advantages(batch: ExperienceBatch, credits: Mapping[ActionKey, ActionCredit]) -> Tensor:
    """[B, T] in the dtype of the log-probs; 0 on masked actions and outside the response."""
    assert batch.old_log_probs_BT is not None
    mask_BT = batch.response_mask_BT
    suffix_kl_BT = suffix_kl(kl_to_reference(batch), mask_BT)
    advantages_BT = torch.zeros_like(batch.old_log_probs_BT)
    for row, experience in enumerate(batch):
        mask_T = mask_BT[row]
        values_T = token_advantages(credits[experience.key], suffix_kl_BT[row, mask_T], batch.kl_coef)
        advantages_BT[row, mask_T] = values_T.to(advantages_BT.dtype)
    return advantages_BT
