"""Decoding of one batch on one model, with a KV cache that finished rows leave.

Axes: R rows as given, B rows still alive, N new tokens, T tokens so far, E ids that end a turn, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from peft import PeftModel
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from lightning_mappa.errors import InfrastructureError
from lightning_mappa.rollout.engine import SamplingParams
from lightning_mappa.rollout.kv_cache import preallocated_cache
from lightning_mappa.rollout.sampling import sample, uniforms

BASE_ADAPTER = "__base__"
"""PEFT's name for rows that no adapter is applied to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    stop_ids: frozenset[int]
    """The row ends with the first of these that is sampled."""
    adapter: str | None = None
    """The LoRA adapter of this row when the model is a PeftModel; None is the base model alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    stopped: bool
    """Ends with a stop id; else it was cut at `max_new_tokens`."""


@torch.inference_mode()
def decode(model: PreTrainedModel | PeftModel, prompts: Sequence[Prompt]) -> list[Sample]:
    """One sample per prompt, in order, with log-probs of the sampling distribution in float32.

    A row's sample does not depend on the others. `model` is in eval mode.

    Raises:
        InfrastructureError: the model's logits are not finite.
    """
    alive = _Alive.start(prompts, model.device)
    input_ids_BT, width = _left_pad(prompts, model.device), alive.mask_BT.shape[1] - alive.uniforms_BN.shape[1]
    cache = preallocated_cache(model.config.get_text_config(), capacity=alive.mask_BT.shape[1])
    ids_RN = torch.zeros(alive.uniforms_BN.shape, dtype=torch.long, device=model.device)
    log_probs_RN = torch.zeros(ids_RN.shape, dtype=torch.float32, device=model.device)
    length_R = torch.zeros(len(prompts), dtype=torch.long, device=model.device)
    stopped_R = torch.zeros(len(prompts), dtype=torch.bool, device=model.device)
    for step in range(ids_RN.shape[1]):
        logits_BV = _next_logits(model, input_ids_BT, alive.mask_BT[:, : width + step], cache, alive.adapters)
        ids_B, log_probs_B = sample(logits_BV, alive.uniforms_BN[:, step], alive.temperature_B, alive.top_p_B)
        ids_RN[alive.row_B, step] = ids_B
        log_probs_RN[alive.row_B, step] = log_probs_B
        stop_B = (ids_B[:, None] == alive.stop_ids_BE).any(1)
        stopped_R[alive.row_B] = stop_B
        length_R[alive.row_B] = step + 1
        going_B = ~stop_B & (alive.max_new_B > step + 1)
        if not going_B.all():
            kept = going_B.nonzero().squeeze(1)
            if not len(kept):
                break
            alive, ids_B = alive.select(kept), ids_B[kept]
            cache.batch_select_indices(kept)
        input_ids_BT = ids_B[:, None]
    if not log_probs_RN.isfinite().all():
        raise InfrastructureError("the model's logits are not finite: its weights are damaged")
    return [
        Sample(ids=tuple(ids[:length]), log_probs=tuple(log_probs[:length]), stopped=stopped)
        for ids, log_probs, length, stopped in zip(
            ids_RN.tolist(), log_probs_RN.tolist(), length_R.tolist(), stopped_R.tolist(), strict=True
        )
    ]


@torch.inference_mode()
def next_log_probs(
    model: PreTrainedModel | PeftModel, prompt_ids: Sequence[int], token_ids: Sequence[int], adapter: str | None
) -> tuple[float, ...]:
    """log p of each of `token_ids` as the next token after one prompt, at temperature 1, in float32."""
    input_ids_BT = torch.tensor([list(prompt_ids)], device=model.device)
    mask_BT = torch.ones_like(input_ids_BT, dtype=torch.bool)
    cache = DynamicCache(config=model.config.get_text_config())
    logits_BV = _next_logits(model, input_ids_BT, mask_BT, cache, (adapter or BASE_ADAPTER,))
    return tuple(logits_BV[0].float().log_softmax(-1)[list(token_ids)].tolist())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Alive:
    """What belongs to the rows that still generate."""

    row_B: Tensor
    """int64, where the row stands among the prompts"""
    mask_BT: Tensor
    """bool over padded prompt and all tokens that may come; false on the pads at the left"""
    uniforms_BN: Tensor
    temperature_B: Tensor
    top_p_B: Tensor
    max_new_B: Tensor
    stop_ids_BE: Tensor
    """int64, filled up with -1"""
    adapters: tuple[str, ...]

    @classmethod
    def start(cls, prompts: Sequence[Prompt], device: torch.device) -> _Alive:
        width = max(len(prompt.ids) for prompt in prompts)
        new = max(prompt.sampling.max_new_tokens for prompt in prompts)
        most_stops = max(len(prompt.stop_ids) for prompt in prompts)
        pads_B1 = torch.tensor([[width - len(prompt.ids)] for prompt in prompts])
        sampling = [prompt.sampling for prompt in prompts]
        stop_ids = [sorted(prompt.stop_ids) + [-1] * (most_stops - len(prompt.stop_ids)) for prompt in prompts]
        return cls(
            row_B=torch.arange(len(prompts), device=device),
            mask_BT=(torch.arange(width + new)[None] >= pads_B1).to(device),
            uniforms_BN=torch.stack([uniforms(prompt.seed, new) for prompt in prompts]).to(device),
            temperature_B=torch.tensor([one.temperature for one in sampling], device=device),
            top_p_B=torch.tensor([one.top_p for one in sampling], dtype=torch.float64, device=device),
            max_new_B=torch.tensor([one.max_new_tokens for one in sampling], device=device),
            stop_ids_BE=torch.tensor(stop_ids, dtype=torch.long, device=device),
            adapters=tuple(prompt.adapter or BASE_ADAPTER for prompt in prompts),
        )

    def select(self, kept: Tensor) -> _Alive:
        return _Alive(
            row_B=self.row_B[kept],
            mask_BT=self.mask_BT[kept],
            uniforms_BN=self.uniforms_BN[kept],
            temperature_B=self.temperature_B[kept],
            top_p_B=self.top_p_B[kept],
            max_new_B=self.max_new_B[kept],
            stop_ids_BE=self.stop_ids_BE[kept],
            adapters=tuple(self.adapters[index] for index in kept.tolist()),
        )


def _left_pad(prompts: Sequence[Prompt], device: torch.device) -> Tensor:
    width = max(len(prompt.ids) for prompt in prompts)
    return torch.tensor([[0] * (width - len(one.ids)) + list(one.ids) for one in prompts], device=device)


def _next_logits(
    model: PreTrainedModel | PeftModel,
    input_ids_BT: Tensor,
    mask_BT: Tensor,
    cache: DynamicCache,
    adapters: tuple[str, ...],
) -> Tensor:
    """[B, V] logits after the last token; `input_ids_BT` are the tokens that the cache does not hold yet."""
    position_ids_BT = (mask_BT.cumsum(1) - 1).clamp(min=0)[:, -input_ids_BT.shape[1] :]
    # One adapter per row: without this a PeftModel answers every row with the active adapter.
    mixed = {"adapter_names": list(adapters)} if isinstance(model, PeftModel) else {}
    return model(
        input_ids=input_ids_BT,
        attention_mask=mask_BT,
        position_ids=position_ids_BT,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
        **mixed,
    ).logits[:, -1]
