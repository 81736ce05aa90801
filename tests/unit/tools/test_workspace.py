import os
import stat
import subprocess
import sys

import pytest

from lightning_mappa.tools.workspace import Workspaces, exceeds, remove_tree


def test_a_workspace_is_private_and_gone_afterwards(tmp_path):
    with Workspaces(tmp_path).open() as path:
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        (path / "file").write_text("x")
    assert os.listdir(tmp_path) == []


def test_it_is_removed_when_the_episode_fails(tmp_path):
    with pytest.raises(RuntimeError), Workspaces(tmp_path).open():
        raise RuntimeError
    assert os.listdir(tmp_path) == []


def test_what_a_killed_run_left_is_removed_and_what_a_living_one_uses_is_not(tmp_path):
    maker = f"""
import os, pathlib
from lightning_mappa.tools.workspace import Workspaces
with Workspaces({os.fspath(tmp_path)!r}).open() as path:
    (path / "file").touch()
    os.kill(os.getpid(), 9)
"""
    (tmp_path / "other").mkdir()
    with Workspaces(tmp_path).open() as living:
        assert subprocess.run([sys.executable, "-c", maker]).returncode == -9
        assert len(os.listdir(tmp_path)) == 3
        with Workspaces(tmp_path).open() as fresh:
            assert {*os.listdir(tmp_path)} == {"other", living.name, fresh.name}
    assert os.listdir(tmp_path) == ["other"]


def test_a_hostile_tree_is_removed_and_links_are_not_followed(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("x")
    root = tmp_path / "root"
    root.mkdir()
    (root / "link").symlink_to(outside)
    (root / "loop").symlink_to("loop")
    os.mkfifo(root / "pipe")
    (root / os.fsdecode(b"\xff\n")).write_text("x")
    (root / "locked" / "inner").mkdir(parents=True)
    (root / "locked" / "inner" / "file").write_text("x")
    (root / "locked" / "inner").chmod(0)
    (root / "locked").chmod(0)
    _nest(root, "d" * 200, 60)
    root.chmod(0)
    remove_tree(root)
    assert os.listdir(tmp_path) == ["outside"]
    assert os.listdir(outside) == ["kept"]


def test_no_depth_is_too_much():
    with Workspaces("/dev/shm").open() as path:
        _nest(path, "d", 2500)
    assert not path.exists()


def test_sizes_are_those_on_disk(tmp_path):
    (tmp_path / "sparse").touch()
    os.truncate(tmp_path / "sparse", 1 << 40)
    assert not exceeds(tmp_path, max_bytes=1000, max_files=1)
    assert exceeds(tmp_path, max_bytes=1000, max_files=0)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "full").write_bytes(bytes(100_000))
    assert exceeds(tmp_path, max_bytes=99_999, max_files=10)
    assert not exceeds(tmp_path, max_bytes=200_000, max_files=10)


def test_links_are_not_counted_through(tmp_path):
    (tmp_path / "link").symlink_to("/usr")
    assert not exceeds(tmp_path, max_bytes=10_000, max_files=1)


def test_what_is_nested_too_deep_to_count_is_too_much(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    _nest(tmp_path, "d", 100)
    assert exceeds(tmp_path, max_bytes=1 << 40, max_files=1000)
    assert len(os.listdir("/proc/self/fd")) == before


def _nest(root, name, depth):
    """Makes a chain of folders, also one whose path is longer than a path can be."""
    folder = os.open(root, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir(name, dir_fd=folder)
        inner = os.open(name, os.O_RDONLY, dir_fd=folder)
        os.close(folder)
        folder = inner
    os.close(folder)
