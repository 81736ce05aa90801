"""A whole run on one GPU that Trainer and engine share: sleep, wake, and weights by IPC."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.integration.conftest import run_fit
from tests.packages import needs

pytestmark = [pytest.mark.gpu, needs("vllm"), pytest.mark.timeout(1800)]


@pytest.mark.parametrize("transport", ["ipc", "object_store"])
def test_a_run_on_one_shared_gpu_goes_through(tmp_path: Path, transport: str) -> None:
    if torch.cuda.device_count() < 1:
        pytest.skip("needs a CUDA device")
    run_fit(
        tmp_path / "run",
        "workflow=single",
        "engine=vllm",
        "runtime=ray",
        "runtime.colocate=true",
        f"engine.weight_transport={transport}",
        "engine.gpu_memory_utilization=0.3",
        "trainer.accelerator=cuda",
        "trainer.max_steps=3",
        "datamodule.rollout_batch_size=4",
        "datamodule.val_limit=8",
    )
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "done"
    assert all(n_bytes > 0 for n_bytes in summary["resources"]["weight_sync_bytes"].values())
