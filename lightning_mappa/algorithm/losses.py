"""The clipped policy loss per token, and its mean over an optimizer step however that step is cut."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_mappa.algorithm.choices import check_option
from lightning_mappa.errors import ConfigError

MAX_LOG_RATIO = 20.0
"""Beyond it exp is cut: a log-ratio of 95 overflows float32, and its gradient with it."""


def check_clipping(*, clip_ratio_low: float, clip_ratio_high: float, dual_clip: float | None) -> None:
    """Raises `ConfigError` unless 0 ≤ low < 1, high ≥ 0, and dual_clip is None or above 1."""
    if not 0.0 <= clip_ratio_low < 1.0:
        raise ConfigError(f"algorithm.clip_ratio_low is {clip_ratio_low}; allowed: at least 0 and below 1")
    if not clip_ratio_high >= 0.0:
        raise ConfigError(f"algorithm.clip_ratio_high is {clip_ratio_high}; allowed: at least 0")
    if dual_clip is not None and not dual_clip > 1.0:
        raise ConfigError(f"algorithm.dual_clip is {dual_clip}; allowed: null or a number above 1")


def clipped_surrogate(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    clip_ratio_low: float,
    clip_ratio_high: float,
    dual_clip: float | None = None,
) -> tuple[Tensor, Tensor]:
    """−min(ratio · A, clip(ratio, 1 − low, 1 + high) · A) per token, and where a clip decided it (bool).

    All three tensors have one shape, [B, T] as a rule; only `log_probs` carries a gradient. `dual_clip` c
    bounds the loss where A < 0: max(min(…), c · A). Inputs outside a mask must be finite: `aggregate` leaves
    their loss out, but the gradient of exp(nan) is nan even times zero.
    """
    ratio = torch.exp((log_probs - old_log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    unclipped = ratio * advantages
    surrogate = torch.minimum(unclipped, ratio.clamp(1.0 - clip_ratio_low, 1.0 + clip_ratio_high) * advantages)
    clipped = surrogate < unclipped
    if dual_clip is not None:
        floor = dual_clip * advantages
        bounded = (advantages < 0) & (surrogate < floor)
        surrogate = torch.where(bounded, floor, surrogate)
        clipped = clipped | bounded
    return -surrogate, clipped


def correction_weights(old_log_probs: Tensor, rollout_log_probs: Tensor, cap: float) -> Tensor:
    """min(exp(old − rollout), cap) per token, detached: what the sampling engine's own log-probs call for.

    Multiplies the clipped loss from outside; advantages and denominators stay as they are.
    """
    log_weight = (old_log_probs - rollout_log_probs).detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return log_weight.exp().clamp(max=cap)


def loss_denominator(mask_BT: Tensor, mode: str) -> int:
    """What the whole mini-batch divides by: unmasked tokens, or sequences that have any.

    Counts of its parts add up, over micro-batches and over ranks. 0 means that no optimizer step is due.
    """
    check_option("algorithm.loss_agg_mode", mode)
    if mode == "token-mean":
        return int(mask_BT.sum())
    return int(mask_BT.any(dim=1).sum())


def aggregate(loss_BT: Tensor, mask_BT: Tensor, mode: str, *, denominator: int) -> Tensor:
    """The share of these rows in the loss of their mini-batch, a scalar; the shares add up to the whole.

    mask_BT: bool. `denominator` is `loss_denominator` of the whole mini-batch over all ranks, not of these
    rows. Rows without an unmasked token give a 0 that stays in the graph.
    """
    check_option("algorithm.loss_agg_mode", mode)
    kept_BT = torch.where(mask_BT, loss_BT, 0.0)
    if mode == "seq-mean-token-mean":
        kept_BT = kept_BT / mask_BT.sum(dim=1, keepdim=True).clamp(min=1)
    return kept_BT.sum() / max(denominator, 1)
