"""Stopped and resumed is the same as never stopped."""

from __future__ import annotations

import json
import signal

import pytest
import torch

from lightning_mappa.config import structured
from lightning_mappa.errors import ConfigError, Preempted
from lightning_mappa.fit import fit
from lightning_mappa.run_folder import RunFolder
from tests.integration import probes
from tests.integration.conftest import exported, run_fit, small_config, untimed_lines

STEPS = ("trainer.max_steps=4", "trainer.val_check_interval=2", "trainer.checkpoint_every=2")
VARIANTS = {
    "full": (),
    "frozen_agent": ("agents.executor.trained=false", "callbacks=[default,early_stopping,lr_monitor]"),
    "coaches_with_memories": (
        "coach=shuffled",
        "coach.coach._target_=lightning_mappa.coaches.stateful.CalibratedCoach",
        "+coach.coach.coach._target_=lightning_mappa.coaches.rules.RulesCoach",
        "+coach.coach.min_count=2",
        "~callbacks.checkpoint_selection",
        "trainer.val_check_interval=3",
    ),
    "lora_adaptive_kl": (
        "model=tiny_lora",
        "model.lora.dropout=0.1",
        "callbacks.kl_penalty.kind=adaptive",
        "callbacks.kl_penalty.kl_target=0.01",
        "callbacks.kl_penalty.kl_horizon=100",
    ),
}

LONG = ("frozen_agent", "coaches_with_memories", "lora_adaptive_kl")


def resume(folder, *overrides):
    cfg = small_config(folder.parent / "unused", *overrides)
    cfg.resume, cfg.output_dir = str(folder), str(folder)
    return fit(cfg)


def compare(straight, resumed):
    for agent in sorted(path.name for path in (straight / "export").iterdir()):
        first, second = exported(straight, agent), exported(resumed, agent)
        assert all(torch.equal(first[name], second[name]) for name in first)
    names = sorted(path.name for path in (straight / "transcripts").iterdir())
    assert names == sorted(path.name for path in (resumed / "transcripts").iterdir())
    for name in names:
        assert untimed_lines(straight, name) == untimed_lines(resumed, name)
    for first, second in zip(metric_lines(straight), metric_lines(resumed), strict=True):
        assert first == second


def metric_lines(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "timing_s"} for line in lines]


def test_a_resume_on_changed_problems_is_refused_before_it_touches_the_run(tmp_path):
    rows = [{"id": str(i), "prompt": f"Ann has {i} pens, buys 2. How many?", "answer": i + 2} for i in range(12)]
    (tmp_path / "problems.json").write_text(json.dumps(rows))
    task = ("task=math_file", f"task.path={tmp_path / 'problems.json'}", "datamodule.val_limit=1")
    run = tmp_path / "run"
    run_fit(run, *task, "trainer.max_steps=1")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    rows[3]["answer"] = 6
    (tmp_path / "problems.json").write_text(json.dumps(rows))
    with pytest.raises(ConfigError, match=r"the (train|selection) split has other tasks since the run began"):
        resume(run, *task, "trainer.max_steps=2")
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_what_a_resume_changes_holds_for_the_next_one(tmp_path):
    run = tmp_path / "run"
    stop = (f"+callbacks.stop._target_={probes.__name__}.SignalSelf", "+callbacks.stop.step=1")
    with pytest.raises(Preempted):
        run_fit(run, *STEPS, *stop)
    with pytest.raises(ConfigError, match=r"trainer\.max_steps=1: the run has done 2 steps already"):
        resume(run, *STEPS, "trainer.max_steps=1")
    with pytest.raises(Preempted):
        resume(run, *STEPS, "trainer.max_steps=5", *stop[:1], "+callbacks.stop.step=2")
    config = RunFolder.open(run).config()
    assert (config.trainer.max_steps, config.resume) == (5, None)
    config.resume = str(run)
    del config.callbacks.stop
    assert fit(structured(config))["steps"] == 5


@pytest.mark.parametrize(
    "variant",
    ["full", *(pytest.param(name, marks=pytest.mark.slow) for name in VARIANTS if name in LONG)],
)
def test_a_stop_between_steps_resumes_to_the_same_bytes(tmp_path, variant):
    overrides = (*STEPS, *VARIANTS[variant])
    run_fit(tmp_path / "straight", *overrides)
    stop = (
        f"+callbacks.stop._target_={probes.__name__}.SignalSelf",
        "+callbacks.stop.step=2",
        f"+callbacks.stop.signum={int(signal.SIGTERM)}",
    )
    with pytest.raises(Preempted, match="stopped after 3 steps"):
        run_fit(tmp_path / "stopped", *overrides, *stop)
    assert json.loads((tmp_path / "stopped" / "summary.json").read_text())["status"] == "preempted"
    summary = resume(tmp_path / "stopped", *overrides)
    assert summary["steps"] == 4
    compare(tmp_path / "straight", tmp_path / "stopped")


def test_a_stop_in_the_middle_of_a_rollout_drops_the_step_and_resumes(tmp_path):
    run_fit(tmp_path / "straight", *STEPS)
    # 6 evaluation episodes, 8 a step, 6 at version 2: the 25th episode is in the rollout of step 2.
    probes.SignalInRollout.played = 0
    with pytest.raises(Preempted, match="stopped after 2 steps"):
        run_fit(
            tmp_path / "stopped",
            *STEPS,
            f"workflow._target_={probes.__name__}.SignalInRollout",
            "+workflow.after=30",
        )
    resume(tmp_path / "stopped", *STEPS)
    compare(tmp_path / "straight", tmp_path / "stopped")


@pytest.mark.slow
def test_a_run_killed_between_checkpoints_goes_on_from_the_last_whole_one(tmp_path):
    run_fit(tmp_path / "straight", *STEPS)
    run_fit(tmp_path / "killed", *STEPS)
    # As kill −9 in step 3 leaves it: a line too many, a torn one, and a checkpoint half written.
    with (tmp_path / "killed" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "succ')
    half = tmp_path / "killed" / "checkpoints" / "step-000003"
    half.mkdir()
    (half / "solver.ckpt").write_bytes(b"torn")
    with pytest.warns(UserWarning, match="passed over a damaged checkpoint: step-000003"):
        resume(tmp_path / "killed", *STEPS)
    compare(tmp_path / "straight", tmp_path / "killed")


def test_a_run_that_is_stopped_before_it_has_done_anything_keeps_the_checkpoint_it_came_from(tmp_path):
    stop = (f"+callbacks.stop._target_={probes.__name__}.SignalSelf", "+callbacks.stop.step=1")
    with pytest.raises(Preempted):
        run_fit(tmp_path / "run", *STEPS, *stop)
    (checkpoint,) = (tmp_path / "run" / "checkpoints").iterdir()
    before = checkpoint.stat()
    with pytest.raises(Preempted, match="stopped after 2 steps"):
        resume(tmp_path / "run", *STEPS, f"+callbacks.stop._target_={probes.__name__}.SignalAtStart")
    (checkpoint,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert (checkpoint.name, checkpoint.stat().st_ino) == ("step-000002", before.st_ino)
    assert resume(tmp_path / "run", *STEPS)["status"] == "done"
