"""The example topologies and baselines train: real engine, real Trainers, the packaged model."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.conftest import run_fit, transcript_lines

SHORT = (
    "trainer.max_steps=1",
    "datamodule.rollout_batch_size=2",
    "algorithm.mini_batch_size=4",
    "datamodule.val_limit=2",
)


def actors(folder: Path) -> dict[str, list[str]]:
    """Episode → who acted, in order."""
    found: dict[str, list[str]] = {}
    for line in transcript_lines(folder):
        found.setdefault(line["episode_id"], []).append(line["agent_id"])
    return found


@pytest.mark.parametrize(
    ("experiment", "allowed"),
    [
        ("debate", {("first", "second", "first", "second", "judge")}),
        ("critic_loop", {("author", *("critic", "author") * n) for n in (1, 2, 3)}),
        ("router", {("router", "reasoner"), ("router", "coder"), ("router", "coder", "coder")}),
        ("single_agent", {("solver",), ("solver", "solver")}),
    ],
)
def test_a_topology_from_yaml_trains(experiment, allowed, tmp_path):
    summary = run_fit(tmp_path / "run", f"experiment={experiment}", *SHORT)
    assert summary["status"] == "done"
    assert summary["steps"] == 1
    counts = summary["counts"]
    assert counts["produced"] == sum(map(len, actors(tmp_path / "run").values())) > 0
    assert counts["produced"] == counts["trained"] + counts["masked"] + counts["queued"] + counts["frozen"]
    # A model that has never learnt to criticise accepts nothing: what is played here is the longest way.
    assert set(map(tuple, actors(tmp_path / "run").values())) <= allowed
