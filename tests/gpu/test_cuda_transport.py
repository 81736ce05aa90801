"""Weights from a GPU to vLLM engines by NCCL, and by IPC on the same GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from lightning_mappa.models.load import load_trained_tensors, trained_parameters, trained_tensors
from lightning_mappa.rollout.vllm_engine import VLLMEngine
from lightning_mappa.strategies.zero import WholeTensors
from tests.integration.vllm_setup import change, fingerprint_gap, group, ray_cluster, save_model, trained
from tests.packages import needs

pytestmark = [pytest.mark.gpu, needs("vllm"), pytest.mark.timeout(900)]


@pytest.fixture
def model_path(tmp_path: Path) -> Iterator[str]:
    with ray_cluster():
        yield save_model(tmp_path / "m", tied=True)


@pytest.mark.parametrize(("transport", "gpus", "num_engines"), [("nccl", 2, 1), ("nccl", 3, 2), ("ipc", 1, 1)])
def test_what_was_sent_is_what_is_served(model_path: str, transport: str, gpus: int, num_engines: int) -> None:
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"needs {gpus} CUDA devices for {transport} to {num_engines} engines")
    from lightning_mappa.runtime.cuda_transport import CudaSender

    own = trained(model_path)
    model: PreTrainedModel = trained(model_path).to("cuda:0")  # type: ignore[arg-type]
    engine = VLLMEngine([group(model_path, weight_transport=transport, num_engines=num_engines)])
    try:
        sender = CudaSender(transport, torch.float32, rank=0, ranks_per_engine=1, timeout_s=120.0)
        for version in (1, 2):
            change(own, version)
            load_trained_tensors(model, trained_tensors(own))
            n_bytes = sender.send(WholeTensors(trained_parameters(model)), engine.actors("solver"))
            engine.announce("solver", version, n_bytes)
            assert fingerprint_gap(engine, own, version) < 2e-3
    finally:
        engine.close()
