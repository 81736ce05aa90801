"""The experiment for a laptop: a short run of it improves, and says so by kind of task."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pytest

KINDS = {"tables/classification", "tables/regression"}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_short_run_improves(tmp_path: Path):
    shorter = ("trainer.max_steps=16", "trainer.val_check_interval=16", "task.generated.selection=16")
    command = [sys.executable, "-m", "lightning_mappa", "fit", "experiment=dsbench_tiny", *shorter, "output_dir=run"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    run = tmp_path / "run"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 16
    first, last = (fmean(line["success"] for line in part) for part in (lines[:5], lines[-5:]))
    assert last > first + 0.1  # 80 episodes each, sampled as they are trained on

    found = json.loads((run / "summary.json").read_text())["val"]["success"]
    assert found["selected"] > found["initial"] + 0.1
    for line in lines:
        assert line["kinds"].keys() <= KINDS
        assert sum(kind["episodes"] for kind in line["kinds"].values()) == line["episodes"] == 16
    val = lines[-1]["val"]
    assert {f"success/{kind}" for kind in KINDS} <= val.keys()
    assert {"fair/accuracy", "fair/f1", "fair/mae_percent", "fair/rmse_percent"} <= val.keys()
