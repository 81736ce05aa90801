"""The loss of an optimizer step, from whole mini-batches or in shares that add up to it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lightning_mappa.algorithm.choices import check_option
from lightning_mappa.algorithm.losses import (
    aggregate,
    check_clipping,
    clipped_surrogate,
    correction_weights,
    loss_denominator,
)
from lightning_mappa.errors import ConfigError
from lightning_mappa.types import ExperienceBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """Clipped, corrected for the sampling engine where asked for, and averaged.

    Raises `ConfigError` for a value that is not allowed, `NotAvailableError` for one that is not built.
    """

    name: str
    loss_agg_mode: str
    clip_ratio_low: float
    clip_ratio_high: float
    dual_clip: float | None
    rollout_correction: float | None
    """Cap of the weight exp(old - rollout) per token; None weighs nothing."""

    def __post_init__(self) -> None:
        check_option("algorithm.policy_loss", self.name)
        check_option("algorithm.loss_agg_mode", self.loss_agg_mode)
        check_clipping(
            clip_ratio_low=self.clip_ratio_low, clip_ratio_high=self.clip_ratio_high, dual_clip=self.dual_clip
        )
        if self.rollout_correction is not None and not self.rollout_correction > 0.0:
            raise ConfigError(f"algorithm.rollout_correction is {self.rollout_correction}; allowed: null or above 0")

    def denominator(self, batch: ExperienceBatch) -> int:
        """What every share of this mini-batch is divided by."""
        return loss_denominator(batch.response_mask_BT, self.loss_agg_mode)

    def share(self, log_probs_BT: Tensor, batch: ExperienceBatch, denominator: int) -> tuple[Tensor, Tensor]:
        """A scalar, and where a clip decided the loss (bool [B, T])."""
        assert batch.old_log_probs_BT is not None
        assert batch.advantages_BT is not None
        loss_BT, clipped_BT = clipped_surrogate(
            log_probs_BT,
            batch.old_log_probs_BT,
            batch.advantages_BT,
            clip_ratio_low=self.clip_ratio_low,
            clip_ratio_high=self.clip_ratio_high,
            dual_clip=self.dual_clip,
        )
        if self.rollout_correction is not None:
            loss_BT = loss_BT * correction_weights(
                batch.old_log_probs_BT, batch.rollout_log_probs_BT, self.rollout_correction
            )
        loss = aggregate(loss_BT, batch.response_mask_BT, self.loss_agg_mode, denominator=denominator)
        return loss, clipped_BT & batch.response_mask_BT
