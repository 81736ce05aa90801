"""What an import costs, and that every class has one name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import lightning_mappa

ROOT = Path(__file__).parents[2]
HEAVY = ("ray", "vllm", "deepspeed", "anthropic")


def loaded_after(statement: str, cwd: Path) -> set[str]:
    """Top-level and own modules that a fresh interpreter holds after `statement`."""
    code = f"{statement}\nimport sys\nprint(*sys.modules, sep='\\n')"
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_the_package_loads_nothing_heavy(tmp_path: Path):
    loaded = loaded_after("import lightning_mappa", tmp_path)
    assert "lightning_mappa" in loaded
    assert not loaded & {*HEAVY, "torch", "lightning", "transformers"}


def test_no_module_loads_what_only_some_runs_need(tmp_path: Path):
    everything = (
        "import importlib, pkgutil, lightning_mappa\n"
        "for found in pkgutil.walk_packages(lightning_mappa.__path__, 'lightning_mappa.'):\n"
        "    if not found.name.endswith('.__main__'): importlib.import_module(found.name)"
    )
    loaded = loaded_after(everything, tmp_path)
    assert "lightning_mappa.fit" in loaded
    assert "lightning_mappa.callbacks.weight_sync" in loaded
    assert not loaded & set(HEAVY)


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


def test_every_class_has_one_import_name():
    """From the root, where `import callbacks` would work too and make a second copy of every class."""
    code = """
import importlib, inspect, pkgutil, sys
import lightning_mappa
for found in pkgutil.walk_packages(lightning_mappa.__path__, "lightning_mappa."):
    if not found.name.endswith(".__main__"):
        importlib.import_module(found.name)
import os
names = {}
for module in list(sys.modules.values()):
    file = getattr(module, "__file__", None) or ""
    if not os.path.realpath(file).startswith(os.getcwd() + os.sep):
        continue
    for name, value in vars(module).items():
        if inspect.isclass(value) and value.__module__ == module.__name__:
            names.setdefault((os.path.realpath(file), name), set()).add(module.__name__)
assert len(names) > 40, len(names)
for place, modules in names.items():
    assert len(modules) == 1, (place, modules)
    assert next(iter(modules)).startswith("lightning_mappa."), (place, modules)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
