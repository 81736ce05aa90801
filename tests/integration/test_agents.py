"""Which agents there are, what they are called, and what the run makes of those that do nothing."""

from __future__ import annotations

import json

import pytest
import torch
from omegaconf import open_dict
from safetensors.torch import load_file

from lightning_mappa import driver
from lightning_mappa.errors import ConfigError
from lightning_mappa.fit import fit
from lightning_mappa.workflows.sequential import SequentialWorkflow
from tests.integration import probes
from tests.integration.conftest import exported, run_fit, small_config


class NeedsGhost(SequentialWorkflow):
    """Seats an agent that no config has."""

    @property
    def agent_ids(self):
        return (*super().agent_ids, "ghost")


def test_a_workflow_that_needs_an_agent_which_is_not_there_is_refused_before_there_is_a_folder(tmp_path):
    with pytest.raises(ConfigError, match="'ghost', no key of agents; allowed: solver, executor, verifier"):
        run_fit(tmp_path / "run", f"workflow._target_={__name__}.NeedsGhost")
    assert not (tmp_path / "run").exists()


def test_agents_may_be_called_anything(tmp_path):
    """Also what the program calls its own parts."""
    names = {"solver": "driver", "executor": "frozen", "verifier": "adapters"}
    cfg = small_config(tmp_path / "run", "trainer.max_steps=1", "agents.verifier.trained=false")
    with open_dict(cfg):
        cfg.agents = {names[agent_id]: agent for agent_id, agent in cfg.agents.items()}
        cfg.workflow.order = list(names.values())
    summary = fit(cfg)
    assert set(summary["score"]) == set(names.values())
    assert summary["counts"]["frozen"] == 8
    assert summary["counts"]["trained"] == summary["counts"]["produced"] - 8


def test_a_trained_agent_that_never_acts_holds_nobody_up(tmp_path):
    summary = run_fit(tmp_path / "run", "workflow.order=[solver,verifier]")
    assert summary["steps"] == 2
    assert summary["counts"]["trained"] == summary["counts"]["produced"] == 2 * 8 * 2
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert line["agents"]["executor"]["empty"] == 1
    assert "score_mean" not in line["agents"]["executor"]


def test_when_no_prompt_fits_the_context_all_is_masked_and_the_run_goes_on(tmp_path):
    summary = run_fit(tmp_path / "run", "+model.context_length=20")
    counts = summary["counts"]
    assert summary["steps"] == 2
    assert summary["masked"] == {"prompt_too_long": counts["produced"]}
    assert counts["masked"] == counts["produced"] > 0 == counts["trained"]


def test_an_agent_that_stops_alone_ends_the_run_with_a_version_that_all_agents_hold(tmp_path, monkeypatch):
    """Its last evaluation, better than any before, is one that the others have not seen."""
    rising = iter([0.1, 0.2, 0.9])
    monkeypatch.setattr(driver, "evaluation_metrics", lambda episodes: {"success": next(rising), "n": 6.0})
    summary = run_fit(
        tmp_path / "run",
        *("trainer.max_steps=6", "trainer.val_check_interval=2"),
        *(f"+callbacks.stop._target_={probes.__name__}.StopOne", "+callbacks.stop.step=2"),
    )
    assert summary["status"] == "done"
    assert summary["steps"] == 3
    assert summary["val"]["history"] == {"0": 0.1, "2": 0.2, "3": 0.9}
    assert (summary["selected_version"], summary["val"]["success"]["selected"]) == (2, 0.2)
    for agent in ("solver", "executor", "verifier"):
        kept = load_file(tmp_path / "run" / "agents" / agent / "selected" / "version-000002.safetensors")
        out = exported(tmp_path / "run", agent)
        assert all(torch.equal(out[name], kept[name]) for name in kept)
