"""Full weights from a Trainer's GPUs to vLLM's, with vLLM's own trainer-side engines: `nccl`, or `ipc` on shared GPUs.

On CUDA only, where vLLM may be imported in a process that trains. Adapters go through the object store on every
machine: vLLM's transfer engines know nothing of them.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import ray
import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

from lightning_mappa.errors import ConfigError
from lightning_mappa.runtime.actor_client import ActorClient
from lightning_mappa.runtime.weight_sender import WholeWeights

if TYPE_CHECKING:
    from vllm.distributed.weight_transfer.base import TrainerWeightTransferEngine


class TensorSource(WeightSource):
    """An agent's current weights, on the GPU and in the dtype that they travel in."""

    def __init__(self, tensors: WholeWeights, dtype: torch.dtype) -> None:
        self.tensors = tensors
        self._dtype = dtype

    @property
    def n_bytes(self) -> int:
        return sum(math.prod(shape) for shape in self.tensors.shapes.values()) * self._dtype.itemsize

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, self._dtype, shape) for name, shape in self.tensors.shapes.items()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.tensors:
            yield name, tensor.to(device="cuda", dtype=self._dtype).contiguous()


class CudaSender:
    """A `WeightSender` over GPUs. The ranks meet the engines in the first `send`.

    Args:
        transport: `nccl`, for engines on other GPUs, or `ipc`, for those on the ranks' own.
        dtype: of the engines' weights.
        rank: of this process in its Trainer; rank 0 sends.
        ranks_per_engine: tensor_parallel_size.
        timeout_s: no call of an engine waits longer.
    """

    def __init__(
        self, transport: str, dtype: torch.dtype, *, rank: int, ranks_per_engine: int, timeout_s: float
    ) -> None:
        if transport not in ("nccl", "ipc"):
            raise ConfigError(f"engine.weight_transport: got {transport!r}, allowed on CUDA are nccl and ipc")
        self._transport = transport
        self._dtype = dtype
        self._rank = rank
        self._ranks_per_engine = ranks_per_engine
        self._timeout_s = timeout_s
        self._source: TensorSource | None = None
        self._transfer: TrainerWeightTransferEngine[Any] | None = None

    def send(self, tensors: WholeWeights, engines: Sequence[Any]) -> int:
        if self._source is None or self._transfer is None:
            self._source = TensorSource(tensors, self._dtype)
            self._transfer = self._meet(self._source, engines)
        self._source.tensors = tensors
        self._transfer.send_weights()
        return self._source.n_bytes

    def _meet(self, source: TensorSource, engines: Sequence[Any]) -> TrainerWeightTransferEngine[Any]:
        info: Any = IPCTrainerInitInfo(packed=True, rank=self._rank)
        if self._transport == "nccl":
            info = NCCLTrainerInitInfo(
                master_address=ray.util.get_node_ip_address(),
                master_port=_free_port(),
                world_size=1 + len(engines) * self._ranks_per_engine,
                packed=True,
                rank=self._rank,
            )
        client = ActorClient(engines, self._ranks_per_engine, self._timeout_s)
        return WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port
