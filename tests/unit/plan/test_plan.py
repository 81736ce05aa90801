"""Whole plans from composed configs: what is printed, what is refused and what to change, and what is left alone."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from omegaconf import DictConfig
from rich.console import Console

from lightning_mappa import cli
from lightning_mappa.checks import check
from lightning_mappa.config import structured
from lightning_mappa.errors import ConfigError
from lightning_mappa.plan.memory import GIB
from lightning_mappa.plan.plan import RunPlan, make_plan, plan
from lightning_mappa.plan.report import as_data, show

SETS = ("task.train.path=x", "task.report.path=x")
PAPER = ("experiment=mathchat_qwen3_4b", *SETS)
R1 = ("experiment=mathchat_r1_1_5b", *SETS)
APART = (
    "runtime.colocate=false",
    *("agents.solver.devices=1", "agents.executor.devices=1", "agents.verifier.devices=1"),
)
VLLM = ("runtime=ray", "engine=vllm")


def composed(*overrides: str) -> DictConfig:
    with initialize_config_module("lightning_mappa.conf", version_base="1.3"):
        cfg = structured(compose("plan", overrides=list(overrides)))
    check(cfg)
    return cfg


def shown(planned: RunPlan) -> str:
    file = io.StringIO()
    show(planned, Console(file=file, width=160))
    return file.getvalue()


def test_the_papers_setting_on_eight_gpus():
    planned = make_plan(composed(*PAPER))
    assert planned.problems == ()
    data = as_data(planned)
    assert {(one["owner"], one["gpu"]) for one in data["processes"]} == {
        ("solver, rank 0", 0),
        ("engine 0 of solver", 0),
        ("solver, rank 1", 1),
        ("engine 1 of solver", 1),
        ("executor, rank 0", 2),
        ("engine 0 of executor", 2),
        ("executor, rank 1", 3),
        ("engine 1 of executor", 3),
        ("verifier, rank 0", 4),
        ("engine 0 of verifier", 4),
        ("verifier, rank 1", 5),
        ("engine 1 of verifier", 5),
    }
    assert {one["share"] for one in data["processes"]} == {0.5}
    assert data["total"] == {
        "steps": 128,
        "episodes": 8192,
        "actions": 32_768,
        "optimizer_steps": 2_048,
        "evaluations": 33,
    }
    assert data["coach"][0]["calls"] == 32_768
    assert data["weight_sync_bytes_per_step"] == 3 * 2 * 2 * 4_022_468_096  # agents, engines, bytes a weight
    parts = {one["part"]: one["bytes"] for one in data["memory"][0]["parts"] if one["owner"] == "solver, rank 0"}
    assert parts["optimizer states"] == 8 * 4_022_468_096 // 2
    rank, engine = data["memory"][0]["always"], data["memory"][0]["rollout"]
    assert data["memory"][0]["peak"] == rank + max(engine, data["memory"][0]["update"]) <= 79 * GIB
    assert engine == pytest.approx(0.4 * 79 * GIB, rel=1e-6)


def test_what_is_shown_has_every_part():
    text = shown(make_plan(composed(*PAPER, "algorithm.mini_batch_size=15")))
    for part in (
        *("placement", "node 0, GPU 5", "32 tasks x 2 samples = 64 episodes", "optimizer states", "KV cache"),
        *("8,192 episodes", "weight sync: 44.95 GiB per step", "at most 32,768 calls", "the run stops at $150.00"),
        "note: agents.solver.devices=2 does not divide algorithm.mini_batch_size=15",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            (*PAPER, *APART, "engine.num_engines=1"),
            r"node 0 GPU 0 needs [\d.]+ GiB and has 79.0, the largest part is optimizer states of solver, rank 0 with "
            r"30.0: set strategy=zero3_offload, or raise agents.solver.devices, or train adapters",
        ),
        ((*PAPER, "engine.gpu_memory_utilization=0.9"), r"KV cache of engine 0 of solver .*: lower engine.gpu_memory"),
        (
            (*PAPER, "model.gradient_checkpointing=false"),
            r"the largest part is activations .*: set model.gradient_checkpointing=true, lower algorithm.micro_batch",
        ),
        ((*PAPER, "plan.gpus_per_node=4"), r"needs 6 GPUs and there are 4 \(1 x 4\): lower agents"),
        ((*PAPER, "plan.gpus_per_node=0"), r"there is no GPU to plan for: set plan.gpus_per_node and"),
        ((*PAPER, "agents.solver.num_engines=3"), r"agents.solver.devices is 2 and .* is 3: set them alike"),
        ((*PAPER, "agents.solver.tensor_parallel_size=3"), r"tensor_parallel_size=3 is not available"),
        (
            (*PAPER, "runtime.colocate=false", "engine.tensor_parallel_size=3"),
            r"needs 24 GPUs and there are 8 .*or set runtime.colocate=true",
        ),
        (
            (*R1, *APART, "engine.num_engines=1", "agents.solver.tensor_parallel_size=5", "plan.nodes=2"),
            r"agents.solver.tensor_parallel_size is 5, which does not divide the 12 heads and 2 key heads",
        ),
        ((*PAPER, "algorithm.mini_batch_size=1"), r"mini_batch_size is 1 for the 2 ranks of solver, .*multiple of 2"),
        (
            (*PAPER, "model.context_length=4096"),
            r"agents.solver: a prompt of 1 tokens and 4096 new ones do not fit a context of 4096; raise agents",
        ),
        (
            (*PAPER, "plan.task_tokens=30000"),
            r"agents.solver: a prompt of 30000 tokens and 4096 new ones do not fit a context of 28672",
        ),
        ((*PAPER, "model.context_length=50000"), r"agents.solver.model.context_length is 50000; allowed: 2 to 40960"),
        ((*PAPER, "engine.gpu_memory_utilization=0.13"), r"KV cache of solver has room for \d+ tokens .* raise engine"),
        (
            (*VLLM, "model=smollm2", "engine.kv_cache_gb=0.1"),
            r"KV cache of solver has room for 2330 tokens and .* have 8192: set engine.kv_cache_gb to 0.36 or more",
        ),
        ((*PAPER, "plan.node_memory_gb=8"), r"node 0 host needs [\d.]+ GiB and has 8.0"),
        (("model=tiny", "+model.lora={target_modules: [nope]}"), r"target_modules is \['nope'\]: no such layer"),
    ],
)
def test_what_cannot_run_is_refused_with_what_to_change(overrides: tuple[str, ...], sentence: str):
    cfg = composed(*overrides, "plan.json=true")
    with pytest.raises(ConfigError, match=sentence):
        plan(cfg)


def test_all_faults_that_show_in_a_plan_are_named_together():
    cfg = composed(*PAPER, "algorithm.mini_batch_size=1", "engine.gpu_memory_utilization=0.13")
    problems = make_plan(cfg).problems
    assert len(problems) == 1 + 2 + 3
    with pytest.raises(ConfigError) as refused:
        plan(cfg)
    assert all(problem in str(refused.value) for problem in problems)


def test_json_is_the_same_plan_and_all_of_stdout(capsys: Any):
    cfg = composed("plan.json=true")
    returned = plan(cfg)
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(returned))
    assert returned["possible"] is True


def test_nothing_is_written_and_no_weights_are_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from transformers import PreTrainedModel

    def refuse(*arguments: Any, **settings: Any) -> Any:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(PreTrainedModel, "from_pretrained", refuse)
    monkeypatch.chdir(tmp_path)
    plan(composed("output_dir=out", "model=smollm2"))
    assert list(tmp_path.iterdir()) == []


def test_in_one_process_trainers_update_by_turns_and_agents_with_adapters_share_a_base():
    full, adapters = make_plan(composed("model=tiny")), make_plan(composed("model=tiny_lora"))
    (host,) = full.devices
    updates = [one for one in host.holdings if one.when == "update" and one.owner.startswith("solver")]
    assert host.update == sum(one.bytes for one in updates)
    engine = {"full": 3 * 4 * 804_864, "adapters": 4 * 804_864}
    for name, planned in (("full", full), ("adapters", adapters)):
        held = {one.part: one.bytes for one in planned.devices[0].holdings if one.owner.startswith("engine")}
        assert held["weights"] == engine[name]
    assert full.sync_bytes == 3 * 4 * 804_864
    assert adapters.sync_bytes == 3 * 4 * adapters.agents[0].lora_parameters


def test_a_cluster_started_here_is_asked_to_hold_two_versions_of_all_weights():
    """3 agents x 2 versions x 4 bytes x 134,515,008 weights: 3.006 GiB; half as much more with a third version."""
    cfg = composed(*VLLM, "model=smollm2")
    planned = make_plan(cfg)
    assert {one.part: one.bytes for one in planned.devices[0].holdings}["object store"] == 2 * GIB
    assert len(planned.notes) == 1
    assert re.search(r"2 versions .* take 3.0 GiB, .* store of 2.0 .*: set runtime.object_store_gb=4", planned.notes[0])
    cfg.runtime.object_store_gb = 4.0
    assert make_plan(cfg).notes == ()
    cfg.runtime.max_staleness = 1
    assert "3 versions of all agents' weights take 4.5 GiB" in make_plan(cfg).notes[0]
    cfg.runtime.address = "auto"
    joined = make_plan(cfg)
    assert joined.notes == ()
    assert "object store" not in {one.part for one in joined.devices[0].holdings}


def test_frozen_agents_have_no_trainer_and_share_an_engine():
    cfg = composed(*VLLM, "model=smollm2", "agents.executor.trained=false", "agents.verifier.trained=false")
    owners = [one.owner for one in make_plan(cfg).processes]
    assert owners == ["solver, rank 0", "engine 0 of solver", "engine 0 of executor, verifier"]
    assert re.search(r"executor .*frozen", shown(make_plan(cfg)))


@pytest.mark.parametrize(
    ("arguments", "code"),
    [((), 0), (("trainer.accelerator=gpu", "plan.gpus_per_node=0"), 2), (("agents.solver.max_new_tokens=256",), 2)],
)
def test_the_command_ends_with_its_exit_code_and_leaves_no_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any, arguments: tuple[str, ...], code: int
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(cli.FULL_ERROR, "0")
    monkeypatch.setattr(sys, "argv", ["mappa", "plan", "plan.json=true", "+model.context_length=256", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == code
    out = capsys.readouterr()
    assert out.err.startswith("mappa: ") if code else json.loads(out.out)["possible"]
    assert list(tmp_path.iterdir()) == []


def test_scored_evaluations_are_billed():
    coach = (*PAPER, "coach=anthropic")
    alone = as_data(make_plan(composed(*coach)))
    scored = make_plan(composed(*coach, "datamodule.val_scored=true", "datamodule.val_limit=10"))
    per_episode = alone["coach"][0]["calls"] // alone["total"]["episodes"]
    # 33 evaluations of 10 tasks with 4 samples each
    assert as_data(scored)["coach"][0]["calls"] == alone["coach"][0]["calls"] + 33 * 10 * 4 * per_episode
    unknown = make_plan(composed(*coach, "datamodule.val_scored=true", "datamodule.val_limit=null"))
    assert as_data(unknown)["coach"][0]["calls"] == alone["coach"][0]["calls"]
    assert any("val_limit is null" in note for note in unknown.notes)
    assert not any("val_limit is null" in note for note in scored.notes)
