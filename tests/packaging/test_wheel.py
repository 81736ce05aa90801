"""The wheel holds what the checkout holds, with and without the three links of the layout."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINKS = ("callbacks", "conf", "datamodules")
SOURCES = ("lightning_mappa", *LINKS, "pyproject.toml", "README.md", "LICENSE")


def copy_sources(to: Path) -> Path:
    """A copy outside the checkout, because a build leaves files behind."""
    to.mkdir()
    unwanted = shutil.ignore_patterns("__pycache__", "*.pyc")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, to / name, symlinks=True, ignore=unwanted)
        else:
            shutil.copy(ROOT / name, to / name)
    return to


def lose_links(tree: Path) -> Path:
    """As git leaves them where links are off: small files that hold the path."""
    for name in LINKS:
        link = tree / "lightning_mappa" / name
        target = str(link.readlink())
        link.unlink()
        link.write_text(target)
    return tree


def wheel_of(tree: Path, out: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", str(out)]
    done = subprocess.run([*pip, str(tree)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (wheel,) = out.glob("*.whl")
    return wheel


def package_files(wheel: Path) -> set[str]:
    return {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}


def files_on_disk() -> set[str]:
    found = {path for path in (ROOT / "lightning_mappa").rglob("*") if path.is_file()}
    for name in LINKS:  # rglob does not walk links
        inside = (path for path in (ROOT / name).rglob("*") if path.is_file())
        found |= {ROOT / "lightning_mappa" / path.relative_to(ROOT) for path in inside}
    return {str(path.relative_to(ROOT)) for path in found if "__pycache__" not in path.parts}


def test_the_layout_has_its_links():
    for name in LINKS:
        link = ROOT / "lightning_mappa" / name
        assert link.is_symlink()
        assert str(link.readlink()) == f"../{name}"


@pytest.mark.parametrize("links", [True, False], ids=["with_links", "without_links"])
def test_the_wheel_equals_the_checkout(tmp_path: Path, links: bool):
    tree = copy_sources(tmp_path / "tree")
    wheel = wheel_of(tree if links else lose_links(tree), tmp_path / "out")
    assert package_files(wheel) == files_on_disk()
    commands = next(name for name in zipfile.ZipFile(wheel).namelist() if name.endswith("entry_points.txt"))
    assert zipfile.ZipFile(wheel).read(commands).decode().split("\n")[1:3] == [
        "lightning-mappa = lightning_mappa.cli:main",
        "mappa = lightning_mappa.cli:main",
    ]


@pytest.mark.parametrize("name", LINKS)
def test_a_bare_run_names_the_missing_link(tmp_path: Path, name: str):
    tree = copy_sources(tmp_path / "tree")
    (tree / "lightning_mappa" / name).unlink()
    # The installed package would step in for what the checkout lacks.
    code = (
        "import runpy, sys\n"
        "sys.meta_path = [f for f in sys.meta_path if 'Editable' not in getattr(f, '__name__', '')]\n"
        "sys.argv = ['mappa', 'fit', '--cfg', 'job']\n"
        "runpy.run_module('lightning_mappa', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tree, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert f"mappa: lightning_mappa.{name} is not there" in done.stderr
    assert f"lightning_mappa/{name} -> ../{name}" in done.stderr
