"""Runs of the real system, small: the packaged model, the real sandbox, real Trainers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from safetensors.torch import load_file
from torch import Tensor

from lightning_mappa.checks import check, check_folders
from lightning_mappa.config import structured
from lightning_mappa.fit import fit
from lightning_mappa.rollout.transcripts import read_transcript

SMALL = (
    "trainer.max_steps=2",
    "trainer.val_check_interval=1",
    "trainer.checkpoint_every=1",
    "trainer.enable_progress_bar=false",
    "datamodule.rollout_batch_size=4",
    "datamodule.n_samples_per_prompt=2",
    "datamodule.val_limit=6",
    "algorithm.mini_batch_size=8",
    "runtime.num_threads=1",
)


def small_config(folder: Path, *overrides: str) -> Any:
    with initialize_config_module("lightning_mappa.conf", version_base="1.3"):
        cfg = structured(compose("fit", overrides=[*SMALL, f"output_dir={folder}", *overrides]))
    check(cfg)
    check_folders(cfg)
    return cfg


def run_fit(folder: Path, *overrides: str) -> dict[str, Any]:
    return fit(small_config(folder, *overrides))


def exported(folder: Path, agent: str) -> dict[str, Tensor]:
    (path,) = (folder / "export" / agent).glob("*.safetensors")
    return load_file(path)


def transcript_lines(folder: Path, pattern: str = "step-*.jsonl") -> list[dict[str, Any]]:
    return [line for path in sorted((folder / "transcripts").glob(pattern)) for line in read_transcript(path)]


def untimed_lines(folder: Path, name: str) -> list[dict[str, Any]]:
    """A transcript without what a clock decides: how long tools took."""
    lines = transcript_lines(folder, name)
    for line in lines:
        for result in line.get("tool_results", ()):
            del result["wall_s"]
    assert lines
    return lines


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    return lambda *overrides, name="run": run_fit(tmp_path / name, *overrides)
