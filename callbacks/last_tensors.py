"""Leaves behind what an agent was at the end of its training."""

from __future__ import annotations

from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer
from safetensors.torch import save_file
from typing_extensions import override

from lightning_mappa.datamodules.rollout import rollout_data
from lightning_mappa.module import AgentModule
from lightning_mappa.saved_weights import VERSION


class LastTensors(Callback):
    """Writes the agent's trained tensors, whole, to one safetensors file when its training ends in good order.

    From the Trainer and not after it, because sharded weights can only be put together while the ranks are there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, AgentModule)
        save_whole(pl_module, self.path, version=rollout_data(trainer).version, writes=trainer.is_global_zero)


def save_whole(module: AgentModule, path: Path, *, version: int, writes: bool) -> None:
    """The trained tensors of all ranks in one file, whole or not at all; asked of every rank alike.

    Args:
        version: of the policy, noted in the file.
        writes: true on one rank: it alone holds copies of them all, in host memory.
    """
    kept = {}
    for name, tensor in module.full_tensors():
        if writes:
            # A copy also on the CPU, because a gathered tensor is gone when the next one is asked for.
            kept[name] = tensor.to("cpu", copy=True).contiguous()
    if writes:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".tmp")
        save_file(kept, partial, metadata={VERSION: str(version)})
        partial.replace(path)
