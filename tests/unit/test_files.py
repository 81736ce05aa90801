"""Whole or not at all; complete or invisible; one writer."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from lightning_mappa.errors import ConfigError, DataError, InfrastructureError
from lightning_mappa.files import publish, verify, write_atomically, write_json
from lightning_mappa.run_folder import RunFolder, restore_random_states


def test_a_failed_write_leaves_the_old_file_and_no_debris(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    write_atomically(path, "old")

    def full_disk(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(InfrastructureError, match=r"a\.json: No space left"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def published(tmp_path):
    temporary, final = tmp_path / ".tmp", tmp_path / "step-000001"
    temporary.mkdir()
    (temporary / "weights").write_bytes(b"0123456789")
    (temporary / "state.json").write_text("{}")
    publish(temporary, final)
    return final


def test_a_published_folder_verifies(tmp_path):
    assert verify(published(tmp_path)) is None


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (lambda f: (f / "weights").write_bytes(b"0123456788"), "weights is not what was written"),
        (lambda f: (f / "weights").write_bytes(b"012"), "weights is not what was written"),
        (lambda f: (f / "weights").write_bytes(b""), "weights is not what was written"),
        (lambda f: (f / "weights").unlink(), "weights is missing"),
        (lambda f: (f / "manifest.json").write_text('{"fi'), "no readable manifest"),
        (lambda f: (f / "manifest.json").unlink(), "no readable manifest"),
    ],
)
def test_every_damage_is_seen(tmp_path, damage, fault):
    folder = published(tmp_path)
    damage(folder)
    assert verify(folder) == fault


@pytest.fixture
def run(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.create(OmegaConf.create({"seed": 1}))
    return folder


def save(run, version, keep=2):
    temporary = run.begin_checkpoint()
    (temporary / "a.ckpt").write_text(str(version))
    run.publish_checkpoint(temporary, version, {"note": version}, keep)


def test_a_damaged_checkpoint_is_passed_over_by_name(run):
    save(run, 2)
    save(run, 4)
    (run.checkpoints / "step-000004" / "a.ckpt").write_text("5")
    folder, passed_over = run.last_checkpoint()
    assert folder.name == "step-000002"
    assert passed_over == ["step-000004: a.ckpt is not what was written"]


def test_old_checkpoints_go_only_after_newer_ones(run):
    for version in (1, 2, 3):
        save(run, version)
    assert sorted(p.name for p in run.checkpoints.iterdir()) == ["step-000002", "step-000003"]


def test_a_damaged_checkpoint_is_not_kept_in_place_of_a_whole_one(run):
    save(run, 2, keep=1)
    save(run, 6, keep=2)
    (run.checkpoints / "step-000006" / "a.ckpt").write_text("5")
    run.rewind(2)
    save(run, 4, keep=1)
    assert run.last_checkpoint() == (run.checkpoints / "step-000004", [])


def test_without_any_complete_checkpoint_resume_says_so(run):
    (run.checkpoints / "step-000001").mkdir(parents=True)
    with pytest.raises(DataError, match=r"no complete checkpoint.*step-000001: no readable manifest"):
        run.last_checkpoint()


def test_random_states_come_back(run):
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    save(run, 1)
    expected = random.random(), np.random.rand(), torch.rand(1).item()
    random.seed(7), np.random.seed(7), torch.manual_seed(7)
    state = restore_random_states(run.checkpoints / "step-000001")
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == expected
    assert state == {"note": 1, "version": 1}


def test_rewind_drops_what_will_be_made_again_and_what_a_crash_left(run):
    run.transcripts.mkdir()
    (run.transcripts / "report-initial.jsonl").write_text("{}")
    (run.checkpoints / ".tmp-1").mkdir(parents=True)
    for step in range(4):
        run.append_metrics({"step": step})
        (run.transcripts / f"step-{step:06d}.jsonl").write_text("{}")
        (run.transcripts / f"selection-{step:06d}.jsonl").write_text("{}")
    with run.metrics.open("a") as file:
        file.write('{"step": 4, "succ')
    run.rewind(2)
    assert [json.loads(line)["step"] for line in run.metrics.read_text().splitlines()] == [0, 1]
    assert sorted(p.name for p in run.transcripts.iterdir()) == [
        "report-initial.jsonl",
        "selection-000000.jsonl",
        "selection-000001.jsonl",
        "selection-000002.jsonl",
        "step-000000.jsonl",
        "step-000001.jsonl",
    ]
    assert list(run.checkpoints.iterdir()) == []


def test_a_second_writer_is_refused_and_a_dead_one_replaced(run):
    program = "import sys, time; print(1, flush=True); time.sleep(30)"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        started = Path(f"/proc/{other.pid}/stat").read_text().rsplit(")", 1)[1].split()[19]
        write_json(run.path / ".lock", {"pid": other.pid, "started": started})
        with pytest.raises(ConfigError, match=f"written by process {other.pid}"), run.writing():
            pass
        other.kill()
    with run.writing():
        assert json.loads((run.path / ".lock").read_text())["pid"] == os.getpid()
    assert not (run.path / ".lock").exists()


def test_a_folder_that_is_not_empty_is_not_taken(run):
    with pytest.raises(ConfigError, match="is not empty"):
        RunFolder(run.path).create(OmegaConf.create({}))


def test_a_folder_without_config_is_no_run(tmp_path):
    with pytest.raises(ConfigError, match="no run folder"):
        RunFolder.open(tmp_path)
