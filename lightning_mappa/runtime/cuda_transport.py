"""Full weights from a Trainer's GPUs to vLLM's, with vLLM's own trainer-side engines: `nccl`, or `ipc` on shared GPUs.

On CUDA only, where vLLM may be imported in a process that trains. Adapters go through the object store on every
machine: vLLM's transfer engines know nothing of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ray
import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

from lightning_mappa.errors import ConfigError

if TYPE_CHECKING:
    from vllm.distributed.weight_transfer.base import TrainerWeightTransferEngine


class TensorSource(WeightSource):
    """What `AgentModule.full_tensors` yields, gathered one at a time and afresh in every pass.

    Args:
        shapes: of every tensor, in the order of a pass; known without gathering anything.
        dtype: that all of them travel in.
    """

    def __init__(
        self,
        tensors: Callable[[], Iterator[tuple[str, Tensor]]],
        shapes: Mapping[str, tuple[int, ...]],
        dtype: torch.dtype,
    ) -> None:
        self._tensors = tensors
        self._shapes = shapes
        self._dtype = dtype

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, self._dtype, shape) for name, shape in self._shapes.items()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._tensors():
            yield name, tensor.to(device="cuda", dtype=self._dtype).contiguous()


class ActorClient:
    """vLLM's control plane (`VLLMWeightSyncClient`) over the actors of one group of engines.

    Args:
        actors: of `VLLMServer`, every engine of the group.
        ranks_per_engine: tensor_parallel_size.
        timeout_s: no call waits longer.
    """

    def __init__(self, actors: Sequence[Any], ranks_per_engine: int, timeout_s: float) -> None:
        self._actors = list(actors)
        self._ranks = ranks_per_engine
        self._timeout_s = timeout_s

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Each engine counts its ranks from 0, so those behind the first are shifted in the group of all."""
        payloads = [
            init_info | {"rank_offset": init_info["rank_offset"] + i * self._ranks}
            if "rank_offset" in init_info
            else init_info
            for i in range(len(self._actors))
        ]
        self._all("init_weight_transfer_engine", payloads)

    def start_weight_update(self) -> None:
        self._all("start_weight_update", [None] * len(self._actors))

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        self._all("update_weights", [update_info] * len(self._actors))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """The version is told to the engines apart, with `VLLMEngine.announce`, which also resets their caches."""
        self._all("finish_weight_update", [None] * len(self._actors))

    def _all(self, method: str, payloads: Sequence[Any]) -> None:
        calls = [actor.transfer.remote(method, payload) for actor, payload in zip(self._actors, payloads, strict=True)]
        ray.get(calls, timeout=self._timeout_s)


def open_transfer(
    transport: str,
    source: WeightSource,
    client: ActorClient,
    *,
    rank: int,
    world_size: int,
    master_address: str,
    master_port: int,
) -> TrainerWeightTransferEngine[Any]:
    """The engine whose `send_weights()` every trainer rank calls after a step.

    Args:
        rank: of this process in its Trainer; rank 0 sends.
        world_size: 1 and the ranks of all engines.
        master_address: where rank 0 listens for engines, on `nccl`.
    """
    if transport == "nccl":
        info: Any = NCCLTrainerInitInfo(
            master_address=master_address, master_port=master_port, world_size=world_size, packed=True, rank=rank
        )
    elif transport == "ipc":
        info = IPCTrainerInitInfo(packed=True, rank=rank)
    else:
        raise ConfigError(f"engine.weight_transport: got {transport!r}, allowed on CUDA are nccl and ipc")
    return WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)
