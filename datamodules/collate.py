"""From one agent's experiences to tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lightning_mappa.types import Experience, ExperienceBatch


def collate(experiences: Sequence[Experience], step: int) -> ExperienceBatch:
    """One row per experience, in the order given: prompt, response, then padding up to the longest row.

    A row without response tokens has an all-false response mask. No experiences make an empty [0, 0] batch.
    """
    lengths = [len(e.prompt_ids) + len(e.response_ids) for e in experiences]
    shape = (len(experiences), max(lengths, default=0))
    input_ids_BT = torch.zeros(shape, dtype=torch.long)
    attention_mask_BT = torch.zeros(shape, dtype=torch.bool)
    response_mask_BT = torch.zeros(shape, dtype=torch.bool)
    rollout_log_probs_BT = torch.zeros(shape, dtype=torch.float32)
    for row, (e, length) in enumerate(zip(experiences, lengths, strict=True)):
        response = slice(len(e.prompt_ids), length)
        input_ids_BT[row, :length] = torch.tensor(e.prompt_ids + e.response_ids, dtype=torch.long)
        attention_mask_BT[row, :length] = True
        response_mask_BT[row, response] = True
        rollout_log_probs_BT[row, response] = torch.tensor(e.rollout_log_probs, dtype=torch.float32)
    return ExperienceBatch(
        step=step,
        experiences=experiences,
        input_ids_BT=input_ids_BT,
        attention_mask_BT=attention_mask_BT,
        response_mask_BT=response_mask_BT,
        rollout_log_probs_BT=rollout_log_probs_BT,
    )
