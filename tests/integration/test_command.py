"""The command as a user runs it: processes, signals, sweeps, mistakes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from lightning_mappa.errors import ConfigError
from tests.integration.conftest import SMALL, exported, run_fit, untimed_lines

MAPPA = [sys.executable, "-m", "lightning_mappa"]


def mappa(*arguments: str, cwd: Path, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*MAPPA, *arguments], cwd=cwd, capture_output=True, text=True, timeout=timeout)


def problems(path: Path, rows: list[dict]) -> Path:
    path.write_text(json.dumps(rows))
    return path


GOOD = [{"prompt": f"What is {i} + {i}?", "answer": 2 * i} for i in range(40)]
BARE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def no_template(folder: Path) -> Path:
    from lightning_mappa.models.load import load_model, load_tokenizer

    tokenizer = load_tokenizer("tiny")
    tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    load_model("tiny", dtype="float32").save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (lambda t: ["task=math_file", f"task.path={t / 'absent.json'}"], "absent.json"),
        (lambda t: ["task=math_file", f"task.path={problems(t / 'a.json', [])}"], "task.path"),
        (lambda t: ["task=math_file", f"task.path={problems(t / 'a.json', GOOD + GOOD[:1])}"], "task.path"),
        (
            lambda t: [
                "task=math_file",
                f"task.path={problems(t / 'a.json', [*GOOD, {'prompt': 'Who?', 'answer': 'Ann'}])}",
            ],
            "Ann",
        ),
        (lambda t: ["model=hf", f"model.path={no_template(t / 'bare')}"], "chat template"),
        (lambda t: ["model=hf", f"model.path={t / 'nothing'}"], "model.path"),
        (lambda t: ["callbacks.kl_penalty.kind=sometimes"], "kind"),
        (lambda t: ["callbacks.checkpoint_selection.mode=best"], "mode"),
        (lambda t: ["workflow.visibility=none"], "workflow.visibility"),
    ],
)
def test_bad_input_is_one_sentence_and_leaves_no_folder(tmp_path, overrides, sentence):
    (tmp_path / "bare").mkdir()
    with pytest.raises(ConfigError, match=sentence) as caught:
        run_fit(tmp_path / "run", *overrides(tmp_path))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_no_thread_survives_a_run(tmp_path):
    before = set(threading.enumerate())
    run_fit(tmp_path / "run", "trainer.max_steps=1")
    left = [thread.name for thread in set(threading.enumerate()) - before if not thread.name.startswith("pymp")]
    assert left == []


def test_a_trainer_that_raises_ends_the_run_with_its_own_error(tmp_path):
    with pytest.raises(ZeroDivisionError):
        run_fit(tmp_path / "run", "+callbacks.broken._target_=tests.integration.probes.Breaks")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "ZeroDivisionError: division by zero"


def test_sigterm_saves_and_exits_with_3_and_resume_finishes(tmp_path):
    steps = ["trainer.max_steps=40", "trainer.enable_progress_bar=true", "trainer.checkpoint_every=100"]
    overrides = [*SMALL, *steps, f"output_dir={tmp_path / 'run'}"]
    with subprocess.Popen(
        [*MAPPA, "fit", *overrides], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        for line in process.stdout:
            if line.startswith("step    2/"):
                process.send_signal(signal.SIGTERM)
                break
        process.stdout.read()
        errors = process.stderr.read()
        assert process.wait(timeout=60) == 3
    assert "go on with: mappa fit resume=" in errors
    done = json.loads((tmp_path / "run" / "summary.json").read_text())["steps"]
    assert 2 <= done < 40
    (checkpoint,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert checkpoint.name == f"step-{done:06d}"
    result = mappa("fit", f"resume={tmp_path / 'run'}", f"trainer.max_steps={done + 1}", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == done + 1


@pytest.mark.slow
def test_a_second_signal_leaves_at_once(tmp_path):
    overrides = [*SMALL, "trainer.max_steps=200", "trainer.enable_progress_bar=true", f"output_dir={tmp_path / 'run'}"]
    with subprocess.Popen([*MAPPA, "fit", *overrides], cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if line.startswith("step "):
                break
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
        start = time.monotonic()
        process.stdout.read()
        assert process.wait(timeout=30) == 3
        assert time.monotonic() - start < 20


@pytest.mark.slow
def test_a_sweep_is_the_same_as_single_runs(tmp_path):
    small = [override for override in SMALL if "max_steps" not in override]
    sweep = mappa("fit", "-m", "seed=0,1", "trainer.max_steps=1", *small, cwd=tmp_path)
    assert sweep.returncode == 0, sweep.stderr
    jobs = sorted(path.parent for path in tmp_path.glob("runs/*/*/config.yaml"))
    assert len(jobs) == 2
    for seed, job in enumerate(jobs):
        single = mappa("fit", f"seed={seed}", "trainer.max_steps=1", *small, f"output_dir=single-{seed}", cwd=tmp_path)
        assert single.returncode == 0, single.stderr
        other = tmp_path / f"single-{seed}"
        assert untimed_lines(job, "step-000000.jsonl") == untimed_lines(other, "step-000000.jsonl")
        for agent in ("solver", "executor", "verifier"):
            first, second = exported(job, agent), exported(other, agent)
            assert all(first[name].equal(second[name]) for name in first)
