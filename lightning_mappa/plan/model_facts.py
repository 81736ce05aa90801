"""What there is to know of a model without its weights."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from lightning_mappa.errors import ConfigError
from lightning_mappa.models.load import load_config
from lightning_mappa.plan.known_models import KNOWN_MODELS


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearLayer:
    name: str
    n_in: int
    n_out: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    parameters: int
    """Tied ones once."""
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_positions: int | None
    linears: tuple[LinearLayer, ...]
    """Where an adapter can be put: every linear layer but the output embedding."""

    def lora_parameters(self, r: int, target_modules: str | Sequence[str]) -> int:
        """r · (n_in + n_out) per targeted layer: two matrices, n_in × r and r × n_out.

        Targets are named as PEFT does it: `all-linear`, or whole names or their last parts.
        """
        chosen = [
            linear
            for linear in self.linears
            if target_modules == "all-linear"
            or any(linear.name == target or linear.name.endswith(f".{target}") for target in target_modules)
        ]
        return sum(r * (linear.n_in + linear.n_out) for linear in chosen)


@functools.cache
def model_facts(path: str) -> ModelFacts:
    """Of the model at `model.path`, counted on a copy without storage.

    Raises:
        ConfigError: the model's config cannot be read here.
    """
    config = _config(path)
    text = config.get_text_config()
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except ValueError as error:
        raise ConfigError(f"model.path: {path!r} is no causal LM ({str(error).splitlines()[0]})") from error
    heads = text.num_attention_heads
    head = model.get_output_embeddings()
    return ModelFacts(
        parameters=sum(p.numel() for p in model.parameters()),
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        intermediate=text.intermediate_size,
        heads=heads,
        kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        vocab=text.vocab_size,
        max_positions=getattr(text, "max_position_embeddings", None),
        linears=tuple(
            LinearLayer(name=name, n_in=module.in_features, n_out=module.out_features)
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear) and module is not head
        ),
    )


def _config(path: str) -> PretrainedConfig:
    if path in KNOWN_MODELS:
        return AutoConfig.for_model(**KNOWN_MODELS[path])
    try:
        return load_config(path)[0]
    except ConfigError as error:
        raise ConfigError(
            f"model.path: nothing is known here of {path!r}; give the folder of a model, be online, or take one of "
            f"{', '.join(KNOWN_MODELS)} ({error})"
        ) from error
