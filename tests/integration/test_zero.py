"""One agent on two ranks, with real processes, gloo and DeepSpeed, against the same agent in one process."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from lightning_mappa.errors import ConfigError
from lightning_mappa.strategies.build import check_checkpoint
from tests.packages import needs

ROOT = Path(__file__).parents[2]
RANKS = 2
LIMIT_S = 600.0
"""For all runs of one pair of processes, on a machine with other work. Ranks that wait for each other for good give
up much sooner, see `rank_program.DEADLINE_S`, and one that has ended takes the other with it."""

pytestmark = [pytest.mark.slow, needs("deepspeed"), pytest.mark.timeout(LIMIT_S + 60)]

AGENT = {"mini_batch_size": 4, "micro_batch_size": 1}
RECOMPUTED = {"gradient_checkpointing": True}
CASES: dict[str, dict[str, Any]] = {
    "plain": {"agent": AGENT},
    "untied": {
        "untied": True,
        "max_steps": 2,
        "agent": {**AGENT, "gradient_checkpointing": True, "logprob_chunk_size": 2},
    },
    "uneven": {"counts": [1, 0, 5], "agent": {"mini_batch_size": 4, "micro_batch_tokens": 16}},
    "unclipped": {"max_steps": 2, "agent": {**AGENT, "micro_batch_size": 2, "grad_clip": 0.0}},
    "lora": {"lora": True, "max_steps": 2, "agent": {**AGENT, **RECOMPUTED}},
    "poisoned": {"poison": 1, "agent": {"mini_batch_size": 16, "micro_batch_size": 3}},
    "bf16": {"precision": "bf16-mixed", "max_steps": 2, "agent": {"mini_batch_size": 4, "micro_batch_size": 4}},
}
LARGE = {"mini_batch_size": 16, "micro_batch_size": 3}
RESUMED = {
    "whole": {"checkpoints": {"1": "solver.ckpt"}, "agent": LARGE},
    "resumed": {"first_step": 1, "resume": "solver.ckpt", "agent": LARGE},
    "lora_whole": {"lora": True, "checkpoints": {"1": "lora.ckpt"}, "agent": LARGE},
    "lora_resumed": {"lora": True, "first_step": 1, "resume": "lora.ckpt", "agent": LARGE},
}


@dataclass(frozen=True)
class Result:
    weights: dict[str, Tensor]
    reports: dict[str, dict[str, float]]
    memory: dict[str, int]

    def column(self, metric: str) -> list[float | None]:
        return [report.get(metric) for _, report in sorted(self.reports.items())]


def train(folder: Path, cases: dict[str, dict[str, Any]], size: int, strategy: str) -> dict[str, Result]:
    """Runs the cases on `size` ranks, or for 0 in one process; a rank that fails takes the others with it."""
    folder.mkdir()
    listed = [{"name": name, "strategy": strategy, **case} for name, case in cases.items()]
    (folder / "cases.json").write_text(json.dumps(listed))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    logs = [(folder / f"{rank}.log").open("w") for rank in range(max(size, 1))]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.integration.rank_program", str(rank), str(size), str(port), str(folder)],
            cwd=ROOT,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        for rank, log in enumerate(logs)
    ]
    end = time.monotonic() + LIMIT_S
    try:
        while any(process.poll() is None for process in processes):
            if time.monotonic() > end or any(process.poll() for process in processes):
                break
            time.sleep(0.1)
    finally:
        for process in processes:
            process.kill()
            process.wait()
        for log in logs:
            log.close()
    ends = [process.returncode for process in processes]
    assert ends == [0] * len(ends), "\n".join((folder / f"{r}.log").read_text()[-3000:] for r in range(len(ends)))
    return {name: result_of(folder, name) for name in cases}


def result_of(folder: Path, name: str) -> Result:
    record = json.loads((folder / f"{name}.json").read_text())
    assert "error" not in record, record["error"]
    return Result(load_file(folder / f"{name}.safetensors"), record["reports"], record["memory"])


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    return train(tmp_path_factory.mktemp("alone") / "runs", CASES, 0, "single_device")


@pytest.fixture(scope="module", params=["zero2", "zero3"])
def together(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    return train(tmp_path_factory.mktemp(request.param) / "runs", CASES, RANKS, request.param)


@pytest.fixture(scope="module")
def offloaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    return train(tmp_path_factory.mktemp("offload") / "runs", {"plain": CASES["plain"]}, RANKS, "zero3_offload")


@pytest.fixture(scope="module", params=["zero2", "zero3"])
def resumed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp(request.param) / "runs"
    train(folder, RESUMED, RANKS, request.param)
    return request.param, folder


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Relative L2 over all weights."""
    assert one.keys() == other.keys()
    both = [torch.cat([weights[name].double().flatten() for name in sorted(weights)]) for weights in (one, other)]
    return float((both[0] - both[1]).norm() / both[0].norm())


@pytest.mark.parametrize("case", ["plain", "untied", "uneven", "unclipped", "lora", "poisoned"])
def test_two_ranks_give_the_weights_of_one_process(alone, together, case):
    """Among them: ranks without a sample, a step without actions, actions of turns 0 … 3, 1 … 5 tokens each."""
    assert distance(alone[case].weights, together[case].weights) < 1e-5
    for metric in ("grad_norm", "pg_loss", "kl", "ppo_kl", "pg_clipfrac", "empty", "skipped", "trained_actions"):
        for expected, got in zip(alone[case].column(metric), together[case].column(metric), strict=True):
            assert got == (expected if expected is None else pytest.approx(expected, rel=1e-4, abs=1e-6)), metric


def test_the_cases_are_what_they_are_said_to_be(alone):
    assert alone["uneven"].column("empty") == [1.0, 1.0, 0.0]
    assert alone["poisoned"].column("skipped") == [0.0, 1.0, 0.0]
    assert max(alone["plain"].column("grad_norm")) > 1.0  # so that clipping at 1 has something to do
    assert distance(alone["plain"].weights, alone["unclipped"].weights) > 1e-3
    assert alone["untied"].weights.keys() > alone["plain"].weights.keys()


def test_kl_is_0_at_step_0_and_not_later(together):
    for case in ("plain", "untied", "lora", "bf16"):
        kl = together[case].column("kl")
        assert kl[0] == 0.0
        assert abs(kl[1]) > 1e-3


def test_bf16_on_two_ranks_stays_close_to_bf16_in_one_process(alone, together):
    assert distance(alone["bf16"].weights, together["bf16"].weights) < 0.1
    assert together["bf16"].column("grad_norm")[0] == pytest.approx(alone["bf16"].column("grad_norm")[0], rel=0.1)


def test_offload_gives_the_same_weights(alone, offloaded):
    assert distance(alone["plain"].weights, offloaded["plain"].weights) < 1e-5


def test_no_rank_holds_the_model_twice(together, request):
    memory = together["plain"].memory
    if "zero3" in request.node.name:
        assert memory["read"] <= memory["largest"]  # one tensor at a time
        assert memory["reference"] <= memory["model"] / RANKS * 1.05
    else:
        assert memory["reference"] == memory["model"]


@pytest.mark.parametrize("case", ["", "lora_"])
def test_a_resumed_run_is_the_uninterrupted_one(resumed, case):
    _, folder = resumed
    whole, later = result_of(folder, f"{case}whole"), result_of(folder, f"{case}resumed")
    assert all(torch.equal(whole.weights[name], tensor) for name, tensor in later.weights.items())
    assert later.reports == {step: whole.reports[step] for step in ("1", "2")}


def test_frozen_weights_are_in_no_checkpoint(resumed):
    _, folder = resumed
    size = {
        name: sum(f.stat().st_size for f in (folder / f"{name}.ckpt").rglob("*_states.pt"))
        for name in ("solver", "lora")
    }
    assert size["lora"] < 0.6 * size["solver"]


CONFIG = {"config": ["trainer.max_steps=2", "logger=csv", "optimizer.lr=1e-3", "algorithm.mini_batch_size=8"]}


def test_train_agent_leaves_the_files_of_one_process_behind(tmp_path):
    """From a config: one CSV log, the selected and the last tensors, each written once and whole."""
    one = train(tmp_path / "one", {"run": CONFIG}, 0, "single_device")["run"]
    two = train(tmp_path / "two", {"run": CONFIG}, RANKS, "zero3")["run"]
    assert distance(one.weights, two.weights) < 1e-5
    files = {
        folder: sorted(
            str(path.relative_to(tmp_path / folder / "run")) for path in (tmp_path / folder / "run").rglob("*.*")
        )
        for folder in ("one", "two")
    }
    assert files["one"] == files["two"]
    for name in ("agents/solver/last.safetensors", "agents/solver/selected/version-000001.safetensors"):
        tensors = [load_file(tmp_path / folder / "run" / name) for folder in ("one", "two")]
        assert distance(*tensors) < 1e-5
    assert distance(load_file(tmp_path / "two/run/agents/solver/last.safetensors"), two.weights) == 0.0


def test_another_strategy_or_number_of_ranks_is_refused(resumed):
    strategy, folder = resumed
    part = folder / "solver.ckpt"
    check_checkpoint(part, "solver", strategy, RANKS)
    other = "zero3" if strategy == "zero2" else "zero2"
    for name, size, message in (
        (strategy, 3, "agents.solver.devices is 3, .* was saved on 2 ranks"),
        (other, RANKS, f"agents.solver.strategy is {other}, .* was saved by {strategy}"),
        ("single_device", 1, "was saved by a zero strategy"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_checkpoint(part, "solver", name, size)
