"""How a batch is cut — into mini-batches that step the optimizer, into what fits one forward — and run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from lightning_mappa.policy import LogProbs, TokenLogProbs
from lightning_mappa.types import ExperienceBatch


def cut(rows: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    """`rows` in order, in pieces of `size`; the last may be smaller. Nothing for no rows."""
    for start in range(0, len(rows), size):
        yield rows[start : start + size]


def forward(policy: TokenLogProbs, batch: ExperienceBatch, chunk_size: int, *, with_entropy: bool = False) -> LogProbs:
    """[B, T] of the response tokens, in one forward."""
    # Lightning's autocast spans a whole training step, and with it the cache of cast weights: what was cast
    # before an optimizer step must not be used after it.
    torch.clear_autocast_cache()
    log_probs: LogProbs = policy(
        batch.input_ids_BT,
        batch.attention_mask_BT,
        select_BT=batch.response_mask_BT,
        temperature=batch.temperature,
        chunk_size=chunk_size,
        with_entropy=with_entropy,
    )
    return log_probs


@torch.no_grad()
def forward_in_pieces(
    policy: TokenLogProbs,
    batch: ExperienceBatch,
    chunk_size: int,
    *,
    micro_batch_size: int,
    with_entropy: bool = False,
) -> LogProbs:
    """[B, T] without a graph; 0 outside the response. Rows without a response are not run."""
    dtype = torch.promote_types(next(policy.parameters()).dtype, torch.float32)
    log_probs_BT = torch.zeros(batch.input_ids_BT.shape, dtype=dtype, device=batch.input_ids_BT.device)
    entropy_BT = torch.zeros_like(log_probs_BT) if with_entropy else None
    rows = batch.response_mask_BT.any(1).nonzero().flatten().tolist()
    for piece in cut(rows, micro_batch_size):
        part = forward(policy, batch.select(piece), chunk_size, with_entropy=with_entropy)
        log_probs_BT[piece, : part.log_probs_BT.shape[1]] = part.log_probs_BT
        if entropy_BT is not None and part.entropy_BT is not None:
            entropy_BT[piece, : part.entropy_BT.shape[1]] = part.entropy_BT
    return LogProbs(log_probs_BT=log_probs_BT, entropy_BT=entropy_BT)


@contextmanager
def gradient_mode(model: nn.Module) -> Iterator[None]:
    """In a model that is in eval mode, train mode for layers that recompute activations and LoRA's dropout.

    Nothing else that acts in train mode belongs in a forward whose ratio to the old policy is taken.
    """
    active = [
        module
        for name, module in model.named_modules()
        if isinstance(module, GradientCheckpointingLayer) or ("lora_dropout" in name and isinstance(module, nn.Dropout))
    ]
    for module in active:
        module.training = True
    try:
        yield
    finally:
        for module in active:
            module.training = False
