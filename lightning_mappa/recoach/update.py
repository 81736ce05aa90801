"""Where the first update of an agent points, by the verdicts that a step has."""

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_mappa.algorithm.advantages import CreditSettings
from lightning_mappa.datamodules.rollout import RolloutDataModule
from lightning_mappa.datamodules.transcript import RecordedLink, RecordedStep
from lightning_mappa.module import AgentModule
from lightning_mappa.runtime.base import AgentLink

Steps = Mapping[int, RecordedStep]


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of two ways to make an update of the same weights."""

    module: AgentModule
    """With the loss of this side; both may hold the same model, since neither changes it."""
    steps: Steps
    settings: CreditSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Direction:
    """Two policy gradients at the same weights, before any clipping of their norm."""

    cosine: float | None
    """None where one of them is zero: nothing was learned from."""
    norm_recorded: float
    norm_new: float


def compare_updates(recorded: Side, new: Side, *, accelerator: str, seed: int) -> Direction:
    """The gradients of the steps' mini-batches, summed on each side, and the angle between the sums.

    They come from the modules' own training step, whose optimizer is kept from stepping: the weights stay.
    Advantages are as these weights see them, so the module's KL to its start is 0; that of others is as recorded.
    """
    a, b = (
        summed_gradient(side.module, side.steps, side.settings, accelerator=accelerator, seed=seed)
        for side in (recorded, new)
    )
    norm_a, norm_b = math.sqrt(_dot(a, a)), math.sqrt(_dot(b, b))
    cosine = _dot(a, b) / (norm_a * norm_b) if norm_a > 0 and norm_b > 0 else None
    return Direction(cosine=cosine, norm_recorded=norm_a, norm_new=norm_b)


def summed_gradient(
    module: AgentModule, steps: Steps, settings: CreditSettings, *, accelerator: str, seed: int
) -> dict[str, Tensor]:
    """By name of the trained parameter, on the CPU; empty where no mini-batch had an advantage."""
    kept = _KeepGradients()
    link = cast(AgentLink, RecordedLink(steps, module.agent_id, settings))
    module.grad_clip = math.inf
    with tempfile.TemporaryDirectory() as folder, torch.random.fork_rng():
        torch.manual_seed(seed)  # LoRA's dropout draws the same on both sides.
        Trainer(
            accelerator=accelerator,
            devices=1,
            max_epochs=1,
            limit_train_batches=len(steps),
            limit_val_batches=0,
            num_sanity_val_steps=0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
            default_root_dir=folder,
            callbacks=[kept],
        ).fit(module, datamodule=RolloutDataModule(link))
    return kept.gradients


class _KeepGradients(Callback):
    """Adds up what the optimizer is about to step along, and takes it away from the optimizer."""

    def __init__(self) -> None:
        self.gradients: dict[str, Tensor] = {}

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        for name, parameter in pl_module.named_parameters():
            if parameter.grad is None:
                continue
            gradient = parameter.grad.detach().to("cpu", torch.promote_types(parameter.dtype, torch.float32))
            known = self.gradients.get(name)
            self.gradients[name] = copy.deepcopy(gradient) if known is None else known + gradient
            parameter.grad = None


def _dot(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """Over the tensors that both have, in float64; one that is missing is 0."""
    return math.fsum(float(a[name].double().flatten() @ b[name].double().flatten()) for name in a.keys() & b.keys())
