"""How a batch is cut — into mini-batches that step the optimizer, into what fits one forward — and run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from lightning_mappa.errors import ConfigError
from lightning_mappa.policy import LogProbs
from lightning_mappa.ranks import Ranks
from lightning_mappa.rollout.fingerprint import Fingerprint
from lightning_mappa.types import Experience, ExperienceBatch

Policy = Callable[..., LogProbs]
"""A `TokenLogProbs`, or what a strategy has wrapped it in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardSize:
    """What one forward may hold. The result does not depend on it.

    Raises `ConfigError` for a size below 1.
    """

    sequences: int
    tokens: int | None = None
    """Padding counted; a sequence that is longer runs alone. None sets no such limit."""
    head_tokens: int = 1024
    """Tokens whose vocabulary row is alive at a time."""

    def __post_init__(self) -> None:
        for key, size in (
            ("micro_batch_size", self.sequences),
            ("micro_batch_tokens", self.tokens),
            ("logprob_chunk_size", self.head_tokens),
        ):
            if size is not None and size < 1:
                raise ConfigError(f"{key} is {size}; allowed: at least 1")

    def cut(self, batch: ExperienceBatch) -> list[list[int]]:
        """The rows that have a response, in pieces: in order, or by length where tokens are limited.

        Neighbours by length waste little on padding, and ranks that are dealt them in turn get equal work.
        """
        rows = batch.response_mask_BT.any(1).nonzero().flatten().tolist()
        if self.tokens is None:
            return [list(piece) for piece in cut(rows, self.sequences)]
        lengths = batch.attention_mask_BT.sum(1).tolist()
        pieces: list[list[int]] = []
        for row in sorted(rows, key=lambda row: -lengths[row]):
            if pieces and len(pieces[-1]) < self.sequences and self._fits(len(pieces[-1]) + 1, lengths[pieces[-1][0]]):
                pieces[-1].append(row)
            else:
                pieces.append([row])
        return pieces

    def _fits(self, n_rows: int, longest: int) -> bool:
        return self.tokens is None or n_rows * longest <= self.tokens


def cut(rows: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    """`rows` in order, in pieces of `size`; the last may be smaller. Nothing for no rows."""
    for start in range(0, len(rows), size):
        yield rows[start : start + size]


def forward(policy: Policy, batch: ExperienceBatch, size: ForwardSize, *, with_entropy: bool = False) -> LogProbs:
    """[B, T] of the response tokens, in one forward."""
    # Lightning's autocast spans a whole training step, and with it the cache of cast weights: what was cast
    # before an optimizer step must not be used after it.
    torch.clear_autocast_cache()
    return policy(
        batch.input_ids_BT,
        batch.attention_mask_BT,
        select_BT=batch.response_mask_BT,
        temperature=batch.temperature,
        chunk_size=size.head_tokens,
        with_entropy=with_entropy,
    )


def padding(like: ExperienceBatch) -> ExperienceBatch:
    """A sequence of one prompt and one response token, for a rank that has nothing left to run.

    It goes through the model as any other, so that this rank takes part in every collective; whoever runs it
    leaves what comes out of it alone.
    """
    device = like.input_ids_BT.device
    nobody = Experience(
        key=("", 0),
        agent_id="",
        turn=0,
        prompt_ids=(0,),
        response_ids=(0,),
        rollout_log_probs=(0.0,),
        score=None,
        temperature=like.temperature,
    )
    return ExperienceBatch(
        step=like.step,
        experiences=[nobody],
        input_ids_BT=torch.zeros(1, 2, dtype=torch.long, device=device),
        attention_mask_BT=torch.ones(1, 2, dtype=torch.bool, device=device),
        response_mask_BT=torch.tensor([[False, True]], device=device),
        rollout_log_probs_BT=torch.zeros(1, 2, device=device),
    )


@torch.no_grad()
def forward_in_pieces(
    policy: Policy,
    batch: ExperienceBatch,
    size: ForwardSize,
    ranks: Ranks,
    *,
    dtype: torch.dtype,
    with_entropy: bool = False,
) -> LogProbs:
    """[B, T] without a graph, the same on all ranks; 0 outside the response. Rows without a response are not run."""
    log_probs_BT = torch.zeros(batch.input_ids_BT.shape, dtype=dtype, device=batch.input_ids_BT.device)
    entropy_BT = torch.zeros_like(log_probs_BT) if with_entropy else None
    for rows in ranks.deal(size.cut(batch)):
        part = forward(policy, batch.select(rows) if rows else padding(batch), size, with_entropy=with_entropy)
        if not rows:
            continue
        log_probs_BT[rows, : part.log_probs_BT.shape[1]] = part.log_probs_BT
        if entropy_BT is not None and part.entropy_BT is not None:
            entropy_BT[rows, : part.entropy_BT.shape[1]] = part.entropy_BT
    return LogProbs(
        log_probs_BT=ranks.total(log_probs_BT),  # every row is of one rank and 0 on all others: an exact sum
        entropy_BT=None if entropy_BT is None else ranks.total(entropy_BT),
    )


@torch.no_grad()
def fingerprint_of(
    policy: Policy,
    prompt_ids: tuple[int, ...],
    token_ids: tuple[int, ...],
    size: ForwardSize,
    device: torch.device,
) -> Fingerprint:
    """What the policy says of each of `token_ids` after the prompt; every rank runs it whole."""
    ids_BT = torch.tensor([[*prompt_ids, token] for token in token_ids], device=device)
    select_BT = torch.zeros_like(ids_BT, dtype=torch.bool)
    select_BT[:, -1] = True
    log_probs_BT = policy(
        ids_BT, torch.ones_like(select_BT), select_BT=select_BT, temperature=1.0, chunk_size=size.head_tokens
    ).log_probs_BT
    return Fingerprint(
        prompt_ids=prompt_ids, token_ids=token_ids, log_probs=tuple(log_probs_BT[:, -1].float().tolist())
    )


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
