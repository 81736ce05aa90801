"""From logits and uniform numbers to tokens: pure, and the same for a row whatever its neighbours are."""

from __future__ import annotations

import torch
from torch import Tensor


def uniforms(seed: int, count: int) -> Tensor:
    """float64 [count] in [0, 1): the random numbers of one request, one for each token it may draw."""
    return torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def sample(logits_BV: Tensor, uniforms_B: Tensor, temperature_B: Tensor, top_p_B: Tensor) -> tuple[Tensor, Tensor]:
    """Draws one token per row by inverting its cumulative distribution in float64.

    Args:
        uniforms_B: float64 in [0, 1).
        temperature_B: float32; 0 takes the most likely token.
        top_p_B: float64 in (0, 1]; keeps the smallest set of most likely tokens that holds this much
            probability.

    Returns:
        ids_B: int64.
        log_probs_B: float32, log-softmax of logits / temperature (of the logits where temperature is 0),
            before the cut at top_p; NaN where a row's logits are not finite.
    """
    greedy_B = temperature_B == 0
    divisor_B = torch.where(greedy_B, torch.ones_like(temperature_B), temperature_B)
    log_probs_BV = torch.log_softmax(logits_BV.float() / divisor_B[:, None], dim=-1)
    probs_BV = log_probs_BV.double().exp()
    cut_B = (top_p_B < 1) & ~greedy_B
    if cut_B.any():
        probs_BV[cut_B] = nucleus(probs_BV[cut_B], top_p_B[cut_B])
    cumulative_BV = probs_BV.cumsum(-1)
    total_B = cumulative_BV[:, -1]
    # Strictly below the total, so that rounding never lands behind the last token with any probability.
    target_B = torch.minimum(uniforms_B * total_B, torch.nextafter(total_B, torch.zeros_like(total_B)))
    drawn_B = torch.searchsorted(cumulative_BV, target_B[:, None], right=True).squeeze(-1)
    ids_B = torch.where(greedy_B, log_probs_BV.argmax(-1), drawn_B).clamp(max=logits_BV.shape[-1] - 1)
    return ids_B, log_probs_BV.gather(-1, ids_B[:, None]).squeeze(-1)


def nucleus(probs_BV: Tensor, top_p_B: Tensor) -> Tensor:
    """`probs_BV` with zeros outside each row's smallest set of likeliest tokens that holds `top_p`."""
    ordered_BV, order_BV = probs_BV.sort(dim=-1, descending=True, stable=True)
    before_BV = ordered_BV.cumsum(-1) - ordered_BV
    kept_BV = torch.where(before_BV < top_p_B[:, None], ordered_BV, torch.zeros_like(ordered_BV))
    return torch.zeros_like(probs_BV).scatter(-1, order_BV, kept_BV)
