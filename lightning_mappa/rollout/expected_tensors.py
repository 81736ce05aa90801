"""The tensors that an engine expects from a trainer: by name and shape, without a weight in memory."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_mappa.errors import InfrastructureError
from lightning_mappa.models.load import add_adapter, trained_tensors
from lightning_mappa.rollout.engine_group import AdapterSpec

Shapes = Mapping[str, tuple[int, ...]]


def expected_shapes(model_path: str, adapter: AdapterSpec | None) -> dict[str, tuple[int, ...]]:
    """What `trained_tensors` names for a model, or for an adapter on it."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_path))
        if adapter is not None:
            targets = adapter.target_modules
            model = add_adapter(
                model,
                r=adapter.r,
                alpha=adapter.alpha,
                dropout=0.0,
                target_modules=targets if isinstance(targets, str) else list(targets),
                seed=0,
            )
        return {name: tuple(tensor.shape) for name, tensor in trained_tensors(model).items()}


def check_shapes(agent_id: str, version: int, expected: Shapes, given: Shapes) -> None:
    """Raises `InfrastructureError` unless both have the same names with the same shapes."""
    where = f"weights of {agent_id!r} at version {version}"
    if missing := expected.keys() - given.keys():
        raise InfrastructureError(f"{where}: {len(missing)} tensors are missing, among them {min(missing)}")
    if unknown := given.keys() - expected.keys():
        raise InfrastructureError(
            f"{where}: {len(unknown)} tensors are unknown to the model, among them {min(unknown)}"
        )
    for name, shape in expected.items():
        if given[name] != shape:
            raise InfrastructureError(f"{where}: {name} has shape {list(given[name])}, the model's is {list(shape)}")
