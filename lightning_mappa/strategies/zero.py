"""DeepSpeed's ZeRO under Lightning, on CUDA and on the CPU."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.environments import ClusterEnvironment
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy
from torch import Tensor, nn
from typing_extensions import override

from lightning_mappa.policy import VocabularyHead
from lightning_mappa.ranks import Ranks
from lightning_mappa.update import OptimizerStep, PlainStep, the_optimizer

STAGES = {"zero2": 2, "zero3": 3, "zero3_offload": 3}
TIMEOUT_MARGIN_S = 120.0
"""By which collectives outlast the run's own deadline, so that the deadline is what ends a run."""


class ZeroStrategy(DeepSpeedStrategy):
    """Lightning's strategy, with these differences.

    It also works on the CPU accelerator, over gloo. The hooks of a step are called as they are and not inside
    one forward of the engine: a rollout step is many forwards, and the engine counts backward passes, and
    plans what to gather next, per forward of its own.

    Args:
        name: a key of STAGES.
        accelerator: `cpu` or `cuda`.
        grad_clip: largest gradient norm; 0 clips nothing.
        deadline_s: longest wait of the run.
    """

    def __init__(
        self,
        name: str,
        *,
        accelerator: str,
        cluster_environment: ClusterEnvironment,
        deadline_s: float,
        grad_clip: float,
    ) -> None:
        self.on_cpu = accelerator == "cpu"
        if self.on_cpu:
            os.environ["DS_ACCELERATOR"] = "cpu"  # read when deepspeed is first imported, which is below
        super().__init__(
            config=zero_config(STAGES[name], offload=name.endswith("offload"), on_cpu=self.on_cpu, grad_clip=grad_clip),
            cluster_environment=cluster_environment,
            process_group_backend="gloo" if self.on_cpu else "nccl",
            timeout=timedelta(seconds=deadline_s + TIMEOUT_MARGIN_S),
            exclude_frozen_parameters=True,
        )

    # -- the CPU -----------------------------------------------------------------------------------------

    @property
    @override
    def root_device(self) -> torch.device:
        """With an index, which DeepSpeed asks for."""
        return torch.device("cpu", 0) if self.on_cpu else super().root_device

    @override
    def setup_environment(self) -> None:
        if self.on_cpu:
            DDPStrategy.setup_environment(self)  # past the check for CUDA
        else:
            super().setup_environment()

    @override
    def setup_distributed(self) -> None:
        if not self.on_cpu:
            super().setup_distributed()
            return
        import deepspeed.ops

        # Only its inference uses this one; building it takes a compiler and 20 s.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        self.set_world_ranks()
        self._init_deepspeed_distributed()

    # -- a rollout step is not one forward -----------------------------------------------------------------

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self.lightning_module is not None
        with self.precision_plugin.train_step_context():
            return self.lightning_module.training_step(*args, **kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self.lightning_module is not None
        with self.precision_plugin.val_step_context():
            return self.lightning_module.validation_step(*args, **kwargs)

    # -- sharded weights -----------------------------------------------------------------------------------

    @override
    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        if self.zero_stage_3:
            from deepspeed.runtime.zero import register_external_parameter

            for module in self.deepspeed_engine.modules():
                if isinstance(module, VocabularyHead):
                    for parameter in module.borrowed:
                        register_external_parameter(module, parameter)


class EngineStep:
    """An optimizer step by DeepSpeed, which also clips, as `zero_config` says."""

    def __init__(self, module: LightningModule, strategy: ZeroStrategy) -> None:
        self._module = module
        self._engine = strategy.deepspeed_engine
        self._optimizer = the_optimizer(module)
        self._engine.optimizer.zero_grad()

    def backward(self, loss: Tensor, *, last: bool) -> None:
        self._engine.set_gradient_accumulation_boundary(last)
        self._module.manual_backward(loss)

    def take(self) -> float:
        self._optimizer.step()
        norm = self._engine.get_global_grad_norm()
        return float(norm) if self._engine.was_step_applied() else math.nan


def optimizer_step(module: LightningModule, grad_clip: float) -> OptimizerStep:
    """The beginning of one, as the module's strategy takes it; `grad_clip` is read without ZeRO only."""
    strategy = module.trainer.strategy
    return EngineStep(module, strategy) if isinstance(strategy, ZeroStrategy) else PlainStep(module, grad_clip)


def release(trainer: Trainer) -> None:
    """Drops whole copies of sharded weights that are kept for the next forward; nothing to do without ZeRO-3."""
    strategy = trainer.strategy
    if isinstance(strategy, ZeroStrategy) and strategy.zero_stage_3:
        strategy.deepspeed_engine.empty_partition_cache()


def zero_config(stage: int, *, offload: bool, on_cpu: bool, grad_clip: float) -> dict[str, Any]:
    """What DeepSpeed is told. Gradients are summed up in float32 whatever the precision of the weights."""
    zero: dict[str, Any] = {"stage": stage, "overlap_comm": not on_cpu, "contiguous_gradients": True}
    if on_cpu:
        zero["stage3_param_persistence_threshold"] = 0  # small models are sharded too, to the last norm
    if offload:
        device = {"device": "cpu", "pin_memory": not on_cpu}
        zero |= {"offload_optimizer": device, "offload_param": device}
    return {
        "train_micro_batch_size_per_gpu": 1,  # only its throughput log reads it
        "gradient_clipping": grad_clip,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": zero,
    }


def ranks_of(trainer: Trainer) -> Ranks:
    """The processes of this Trainer."""
    strategy = trainer.strategy
    if trainer.world_size == 1:
        return Ranks()

    def total(tensor: Tensor) -> Tensor:
        summed = strategy.reduce(tensor.clone(), reduce_op="sum")
        assert isinstance(summed, Tensor)
        return summed

    return Ranks(rank=trainer.global_rank, size=trainer.world_size, total=total)


def shard(parameter: nn.Parameter) -> Tensor:
    """What this rank holds of a parameter between two forwards: all of it, but for ZeRO-3."""
    return getattr(parameter, "ds_tensor", parameter)


@dataclass(frozen=True)
class WholeTensors:
    """Each parameter's values, whole for as long as nothing more is asked for; may be read more than once.

    Under ZeRO-3 one at a time is put together, on every rank, so every rank has to read all of them.
    """

    parameters: Mapping[str, nn.Parameter]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of every tensor, in the order of a reading, without putting anything together."""
        return {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in self.parameters.items()}

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.parameters.items():
            if hasattr(parameter, "ds_tensor"):
                from deepspeed.runtime.zero import GatheredParameters

                with GatheredParameters([parameter]):
                    yield name, parameter.detach()
            else:
                yield name, parameter.detach()
