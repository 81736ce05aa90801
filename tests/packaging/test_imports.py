"""What an import costs, and that every class has one name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import lightning_mappa

ROOT = Path(__file__).parents[2]
HEAVY = ("ray", "vllm", "deepspeed", "anthropic")
OF_ONE_OPTION = (
    *(f"lightning_mappa.rollout.{name}" for name in ("object_store_transfer", "replica", "spawn", "vllm_engine")),
    *(
        f"lightning_mappa.runtime.{name}"
        for name in ("actor_client", "cuda_transport", "engines", "ray_cluster", "ray_place")
    ),
    *(f"lightning_mappa.runtime.{name}" for name in ("relay", "remote_engine")),
)
"""Modules that runtime=ray or engine=vllm loads, and nothing else."""


def loaded_after(statement: str, cwd: Path) -> set[str]:
    """Top-level and own modules that a fresh interpreter holds after `statement`."""
    code = f"{statement}\nimport sys\nprint(*sys.modules, sep='\\n')"
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.fixture(scope="module")
def everything() -> dict[str, Any]:
    """After an import of every module but those of one option, in the root of the checkout: the names of all modules
    loaded, and of every class of ours (by file and name) the modules that it claims to be defined in."""
    code = (
        f"""
skipped = {OF_ONE_OPTION!r}
"""
        + """
import importlib, inspect, json, os, pkgutil, sys
import lightning_mappa
for found in pkgutil.walk_packages(lightning_mappa.__path__, "lightning_mappa."):
    if not found.name.endswith(".__main__") and found.name not in skipped:
        importlib.import_module(found.name)
classes = {}
for module in list(sys.modules.values()):
    file = os.path.realpath(getattr(module, "__file__", None) or "")
    if file.startswith(os.getcwd() + os.sep):
        for name, value in vars(module).items():
            if inspect.isclass(value) and value.__module__ == module.__name__:
                classes.setdefault(f"{file} {name}", []).append(module.__name__)
print(json.dumps({"modules": sorted(sys.modules), "classes": classes}))
"""
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_the_package_loads_nothing_heavy(tmp_path: Path):
    loaded = loaded_after("import lightning_mappa", tmp_path)
    assert "lightning_mappa" in loaded
    assert not loaded & {*HEAVY, "torch", "lightning", "transformers"}


def test_the_command_line_can_still_set_what_torch_reads_when_it_is_loaded(tmp_path: Path):
    assert "torch" not in loaded_after("import lightning_mappa.cli", tmp_path)


def test_no_module_loads_what_only_some_runs_need(everything: dict[str, Any]):
    assert {"lightning_mappa.fit", "lightning_mappa.callbacks.weight_sync"} <= set(everything["modules"])
    assert not set(everything["modules"]) & set(HEAVY)


def test_values_and_formulas_need_no_lightning(tmp_path: Path):
    statement = (
        "import lightning_mappa.types, lightning_mappa.algorithm.advantages, "
        "lightning_mappa.algorithm.losses, lightning_mappa.algorithm.kl, lightning_mappa.algorithm.rewards"
    )
    loaded = loaded_after(statement, tmp_path)
    assert "torch" in loaded
    assert "lightning" not in loaded


@pytest.mark.parametrize("name", lightning_mappa.__all__)
def test_every_public_name_is_there(name: str):
    assert getattr(lightning_mappa, name).__name__ == name
    assert name in dir(lightning_mappa)


def test_a_name_that_is_not_public_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        _ = lightning_mappa.Nothing


def test_every_class_has_one_import_name(everything: dict[str, Any]):
    """In the root `import callbacks` would work too, and make a second copy of every class."""
    classes = everything["classes"]
    assert len(classes) > 40
    assert {place: modules for place, modules in classes.items() if len(modules) > 1} == {}
    assert all(module.startswith("lightning_mappa.") for modules in classes.values() for module in modules)
