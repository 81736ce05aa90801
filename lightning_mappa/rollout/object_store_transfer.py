"""vLLM's worker side of a weight update that arrives as buckets of Ray's object store. Imports vLLM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from lightning_mappa.runtime.weight_transport import Bucket, PackedTensor, unpack


@dataclass
class ObjectStoreInit(WeightTransferInitInfo):
    """Nothing: the buckets come with each update."""


@dataclass
class ObjectStoreUpdate(WeightTransferUpdateInfo):
    """The fields of one `Bucket`."""

    tensors: tuple[PackedTensor, ...]
    data: NDArray[np.uint8]


class ObjectStoreTransferEngine(WeightTransferEngine[ObjectStoreInit, ObjectStoreUpdate]):
    """Loads buckets in checkpoint format, layer by layer, into the memory that the model already has."""

    init_info_cls = ObjectStoreInit
    update_info_cls = ObjectStoreUpdate

    def init_transfer_engine(self, init_info: ObjectStoreInit) -> None:
        """Nothing to set up."""

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: ObjectStoreUpdate) -> None:
        bucket = Bucket(tensors=update_info.tensors, data=update_info.data)
        self.model.load_weights(iter(unpack(bucket).items()))

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            repack_kept_weights(self.model)

    def shutdown(self) -> None:
        """Nothing to release."""


def repack_kept_weights(model: torch.nn.Module) -> None:
    """Packs again what is multiplied with on CPU, for modules that also keep their weight as it is.

    A head tied to the embedding is never loaded itself, and would go on with what was packed at the start.
    """
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if hasattr(module, "cpu_linear") and isinstance(weight, torch.Tensor) and weight.numel() > 0:
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)


class WorkerExtension:
    """Adds nothing to vLLM's workers; naming it has each of their processes import, and so register, the above."""


WeightTransferEngineFactory.register_engine("object_store", ObjectStoreTransferEngine)
