"""Rollouts that run ahead of training: by how much, with which weights, and that nothing is lost."""

from __future__ import annotations

import json

import pytest
import torch

from tests.integration.conftest import exported, run_fit, transcript_lines, untimed_lines

STEPS = (
    "trainer.max_steps=5",
    "trainer.val_check_interval=2",
    "trainer.checkpoint_every=10",
    "algorithm.rollout_correction=2",
)


def versions(folder):
    """Rollout step → the versions that its actions were sampled with."""
    found: dict[int, set[int]] = {}
    for line in transcript_lines(folder):
        if line["index"] >= 0:
            found.setdefault(int(line["episode_id"].split("-")[1]), set()).add(line["policy_version"])
    return found


@pytest.mark.parametrize("staleness", [1, 2])
def test_a_rollout_samples_with_weights_of_exactly_so_many_steps_before(tmp_path, staleness):
    summary = run_fit(tmp_path / "run", *STEPS, f"runtime.max_staleness={staleness}")
    assert versions(tmp_path / "run") == {step: {max(0, step - staleness)} for step in range(5)}
    assert summary["status"] == "done"
    assert summary["counts"]["produced"] == summary["counts"]["trained"] + summary["counts"]["masked"]
    assert sorted(summary["val"]["history"]) == ["0", "2", "4"]


@pytest.mark.slow
def test_the_same_seed_gives_the_same_run_whatever_overlaps(tmp_path):
    for name in ("first", "second"):
        run_fit(tmp_path / name, *STEPS, "runtime.max_staleness=1")
    for agent in ("solver", "executor", "verifier"):
        one, other = (exported(tmp_path / name, agent) for name in ("first", "second"))
        assert all(torch.equal(one[name], other[name]) for name in one)
    for path in (tmp_path / "first" / "transcripts").iterdir():
        assert untimed_lines(tmp_path / "first", path.name) == untimed_lines(tmp_path / "second", path.name)


def test_an_evaluation_is_of_its_own_version_at_any_staleness(tmp_path):
    """Version 1 is made of the same rollout, so it has to answer the same."""
    for staleness in (0, 2):
        overrides = ("trainer.max_steps=2", "trainer.val_check_interval=1", "algorithm.rollout_correction=2")
        run_fit(tmp_path / str(staleness), *overrides, f"runtime.max_staleness={staleness}")
    one, other = (untimed_lines(tmp_path / name, "selection-000001.jsonl") for name in ("0", "2"))
    assert one == other
    assert {line["policy_version"] for line in one if line["index"] >= 0} == {1}


@pytest.mark.slow
def test_actors_overlap_to_the_same_numbers(tmp_path):
    run_fit(tmp_path / "local", *STEPS, "runtime.max_staleness=1")
    run_fit(tmp_path / "ray", *STEPS, "runtime.max_staleness=1", "runtime=ray", "runtime.object_store_gb=0.2")
    for agent in ("solver", "executor", "verifier"):
        one, other = (exported(tmp_path / name, agent) for name in ("local", "ray"))
        assert all(torch.equal(one[name], other[name]) for name in one)
    lines = [json.loads(line) for line in (tmp_path / "ray" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(5))
