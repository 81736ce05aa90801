"""One set of weights in several roles, through whole runs."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from peft import PeftModel
from transformers import AutoModelForCausalLM

from lightning_mappa import evaluate
from lightning_mappa.agents import load_agents
from lightning_mappa.compare.compare import compare as compare_command
from lightning_mappa.compare.runs import flat_condition
from lightning_mappa.config import structured
from lightning_mappa.datamodules.transcript import RecordedSteps, TranscriptDataModule
from lightning_mappa.errors import ConfigError, Preempted
from lightning_mappa.export import export
from lightning_mappa.recoach.recoach import recoach
from lightning_mappa.rollout.transcripts import read_episodes
from lightning_mappa.run_folder import RunFolder
from lightning_mappa.system import build_engine
from tests.integration import probes
from tests.integration.conftest import exported, run_fit, small_config, transcript_lines
from tests.integration.test_resume import compare, resume

SHARED = "experiment=shared_policy"
ROLES = ("solver", "executor", "verifier")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("shared") / "run"
    run_fit(folder, SHARED)
    return folder


def metric_lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_there_is_one_agent_with_every_roles_actions(run: Path):
    summary = json.loads((run / "summary.json").read_text())
    assert summary["counts"]["trained"] == summary["counts"]["produced"] > 0
    assert summary["mismatch"]["ratio_max"] == pytest.approx(1.0, abs=1e-4)
    assert set(summary["score"]) == set(ROLES)
    for folder in ("agents", "export", "csv"):
        assert [path.name for path in (run / folder).iterdir()] == ["solver"]
    for line in metric_lines(run):
        assert list(line["agents"]) == ["solver"]
        assert line["agents"]["solver"]["trained_actions"] == line["counts"]["produced"]


def test_behaviour_is_told_of_roles_and_training_of_the_agent(run: Path):
    lines = [line for line in transcript_lines(run, "step-000000.jsonl") if line["index"] >= 0]
    report = metric_lines(run)[0]["agents"]["solver"]
    for role in ROLES:
        own = [line for line in lines if line["agent_id"] == role]
        mean = sum(len(line["response_ids"]) for line in own) / len(own)
        assert report[f"{role}/response_length"] == pytest.approx(mean)
        assert report[f"{role}/score_mean"] == pytest.approx(sum(line["verdict"]["score"] for line in own) / len(own))
        rate = sum(bool(line["tool_calls"]) for line in own) / len(own)
        assert report[f"{role}/tool_call_rate"] == pytest.approx(rate)
    assert {"kl", "lr", "pg_loss", "grad_norm"} <= report.keys()
    assert not {"score_mean", "response_length", "tool_call_rate"} & report.keys()
    text = (run / "csv" / "solver" / "version_0" / "metrics.csv").read_text()
    assert "train/verifier/score_mean" in text
    val = metric_lines(run)[0]["val"]
    assert {f"behaviour/{role}/length" for role in ROLES} <= val.keys()


def test_transcripts_name_role_and_weights_and_read_back(run: Path):
    lines = transcript_lines(run, "step-*.jsonl")
    assert {(line["agent_id"], line["weights"]) for line in lines} == {(role, "solver") for role in ROLES}
    assert {line["role"] for line in lines} == {"Problem Solver", "Code Executor", "Verifier"}
    assert all(line["policy_version"] == line["step"] for line in lines)
    (first, *_) = read_episodes(run / "transcripts" / "step-000000.jsonl")
    assert [action.owner for action in first.episode.actions] == ["solver"] * len(first.episode.actions)


def test_advantages_are_normalised_over_all_roles(run: Path):
    lines = transcript_lines(run, "step-000001.jsonl")
    rewards = torch.tensor(
        [line["reward"] - line["kl_coef"] * line["stats"]["kl_sum"] for line in lines], dtype=torch.float64
    )
    given = torch.tensor([line["advantage"] for line in lines], dtype=torch.float64)
    expected = (rewards - rewards.mean()) / (rewards.std(correction=0) + 1e-8)
    assert torch.allclose(given, expected, rtol=0, atol=1e-9)


def test_no_two_samples_of_a_step_have_one_seed(run: Path):
    for name in ("step-000000.jsonl", "selection-000000.jsonl"):
        seeds = [line["seed"] for line in transcript_lines(run, name)]
        assert len(set(seeds)) == len(seeds)


def test_two_roles_with_one_prompt_do_not_say_the_same(tmp_path: Path):
    """The debaters of one policy read the same problem: with one seed they would be one debater."""
    run_fit(
        tmp_path / "run",
        *("workflow=debate", "agents.second.weights=first", "trainer.max_steps=1", "datamodule.temperature=1.5"),
        "optimizer.lr=0",
    )
    lines = [line for line in transcript_lines(tmp_path / "run", "step-*.jsonl") if line["turn"] == 0]
    said: dict[str, dict[str, dict[str, Any]]] = {}
    for line in lines:
        said.setdefault(line["episode_id"], {})[line["agent_id"]] = line
    pairs = [(one["first"], one["second"]) for one in said.values()]
    assert all(a["prompt_ids"] == b["prompt_ids"] and a["seed"] != b["seed"] for a, b in pairs)
    assert any(a["response_ids"] != b["response_ids"] for a, b in pairs)


@pytest.mark.parametrize("model", ["tiny", "tiny_lora"])
def test_one_model_or_adapter_is_loaded_and_served(tmp_path: Path, model: str):
    cfg = small_config(tmp_path / "run", SHARED, f"model={model}")
    agents = load_agents(cfg)
    assert list(agents) == ["solver"]
    served = build_engine(cfg, agents)._served
    assert list(served) == ["solver"]
    whole = served["solver"].model
    assert (list(whole.peft_config) == ["solver"]) if isinstance(whole, PeftModel) else model == "tiny"


def test_shared_and_own_weights_and_a_frozen_agent_go_together(tmp_path: Path):
    """The verifier acts as the frozen solver does; only the executor learns."""
    summary = run_fit(
        tmp_path / "run",
        *("agents.verifier.weights=solver", "agents.solver.trained=false", "trainer.max_steps=1"),
    )
    lines = transcript_lines(tmp_path / "run", "step-*.jsonl")
    frozen = [line for line in lines if line["agent_id"] != "executor"]
    assert all(line["frozen"] and line["weights"] == "solver" for line in frozen)
    assert summary["counts"]["frozen"] == len(frozen) == 16
    assert summary["counts"]["trained"] == len(lines) - 16
    assert [path.name for path in (tmp_path / "run" / "export").iterdir()] == ["executor"]
    (line,) = metric_lines(tmp_path / "run")
    assert "score_mean" in line["agents"]["executor"]


def saved(folder: Path, **changes: Any) -> DictConfig:
    written = OmegaConf.load(folder / "config.yaml")
    assert isinstance(written, DictConfig)
    merged = OmegaConf.merge(written, OmegaConf.create({"run": str(folder)} | changes))
    assert isinstance(merged, DictConfig)
    return structured(merged)


def test_the_weights_are_exported_once_and_for_whom_is_said(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    result = export(saved(run, export={"to": str(tmp_path), "version": "last"}))
    assert result["roles"] == {"solver": list(ROLES)}
    assert [path.name for path in tmp_path.iterdir()] == ["solver"]
    assert "solver, version 2, the weights of solver, executor, verifier: " in capsys.readouterr().out
    AutoModelForCausalLM.from_pretrained(tmp_path / "solver")
    sentence = "agent=verifier acts with the weights of solver; allowed: solver"
    with pytest.raises(ConfigError, match=sentence):
        export(saved(run, export={"agent": "verifier"}))


def test_the_selected_weights_are_validated_and_tested_in_every_role(run: Path, capsys: pytest.CaptureFixture[str]):
    summary = json.loads((run / "summary.json").read_text())
    measured = evaluate.validate(saved(run))["val"]
    assert measured["success"] == summary["val"]["success"]["selected"]
    cfg = saved(run)
    cfg.datamodule.report_limit = 4
    assert evaluate.test(cfg)["n"] == 4


@pytest.mark.slow
def test_runs_of_one_policy_and_of_three_are_two_conditions(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run_fit(tmp_path / "apart")
    assert compare_command([str(run), str(tmp_path / "apart"), "--json"]) == 0
    conditions = [flat_condition(RunFolder(folder).config()) for folder in (run, tmp_path / "apart")]
    differing = {key for key in conditions[0] if conditions[0][key] != conditions[1][key]}
    assert differing == {"agents.executor.weights", "agents.verifier.weights"}
    assert "agents.verifier.weights" in capsys.readouterr().out


def test_another_credit_is_worked_out_by_role_and_its_update_by_agent(run: Path):
    cfg = saved(run)
    cfg.recoach.name, cfg.algorithm.return_scope = "further", "trajectory"
    report = recoach(cfg)
    assert list(report["agents"]) == list(ROLES)
    updates = {role: figures["update"] for role, figures in report["agents"].items()}
    assert -1 <= updates["solver"]["cosine"] < 1
    assert updates["verifier"]["reason"] == "it acts with the weights of solver, whose update holds its actions"
    assert all(figures["verdicts"]["actions"] > 0 for figures in report["agents"].values())


def test_a_recording_is_trained_on_as_one_agent(run: Path):
    step = RecordedSteps(run)[0]
    assert {e.agent_id for e in step.experiences} == {row.agent_id for row in step.rows} == {"solver"}
    assert {row.acted_as for row in step.rows} == set(ROLES)
    link = TranscriptDataModule(str(run), "solver").link
    assert len(link.experience(0)) == len(step.rows)
    with pytest.raises(ConfigError, match=r"agent_id='verifier' is not in .*; recorded are solver"):
        TranscriptDataModule(str(run), "verifier")


STEPS = ("trainer.max_steps=4", "trainer.val_check_interval=2", "trainer.checkpoint_every=2")


@pytest.mark.slow
def test_stopped_and_resumed_is_the_same_as_never_stopped(tmp_path: Path):
    variant = (SHARED, "model=tiny_lora", "model.lora.dropout=0.1")
    run_fit(tmp_path / "straight", *STEPS, *variant)
    stop = (f"+callbacks.stop._target_={probes.__name__}.SignalSelf", "+callbacks.stop.step=1")
    with pytest.raises(Preempted):
        run_fit(tmp_path / "stopped", *STEPS, *variant, *stop, f"+callbacks.stop.signum={int(signal.SIGTERM)}")
    resume(tmp_path / "stopped", *STEPS, *variant)
    compare(tmp_path / "straight", tmp_path / "stopped")


@pytest.fixture
def ray_ends() -> Iterator[None]:
    import ray

    yield
    ray.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("variant", [(SHARED,), ("agents.verifier.weights=solver", "model=tiny_lora")])
def test_actors_give_the_numbers_of_one_process(tmp_path: Path, variant: tuple[str, ...], ray_ends: None):
    from tests.integration.test_ray import RAY, same

    run_fit(tmp_path / "local", *variant)
    summary = run_fit(tmp_path / "ray", *variant, *RAY)
    same(tmp_path / "local", tmp_path / "ray")
    agents = {path.name for path in (tmp_path / "ray" / "export").iterdir()}
    assert summary["resources"]["weight_sync_bytes"].keys() == agents
    assert {f"rank 0 of agent {agent}" for agent in agents} <= summary["resources"]["peak_rss_gib"].keys()


@pytest.mark.slow
def test_the_shared_policy_learns(tmp_path: Path):
    """Half of the default run: 0.32 untrained, on 128 problems of the selection split."""
    sizes = ("trainer.max_steps=15", "trainer.val_check_interval=15", "datamodule.val_limit=null")
    steps = ("datamodule.rollout_batch_size=16", "algorithm.mini_batch_size=16", "trainer.checkpoint_every=15")
    success = run_fit(tmp_path / "run", SHARED, *sizes, *steps)["val"]["success"]
    assert success["selected"] - success["initial"] > 0.15
    before = AutoModelForCausalLM.from_pretrained(load_path()).state_dict()
    after = exported(tmp_path / "run", "solver")
    assert any(not torch.equal(after[name], before[name]) for name in after)


def load_path() -> str:
    from lightning_mappa.models.load import resolve_path

    return str(resolve_path("tiny"))
