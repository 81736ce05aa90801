"""A memory limit that the kernel keeps for a program and all it starts, where this user may make control groups.

It is exact, where `memory.holds_more_than` looks ten times a second; it counts /tmp and /dev/shm too.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_PREFIX = "mappa-"
_number = itertools.count().__next__
_REMOVAL_S = 1.0
_TRIAL_BYTES = 64 << 20
_ENTER = 'echo $$ > "$0/cgroup.procs" && exec "$@"'


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    path: Path
    limit_file: str
    swap_file: str
    swap_limit: int
    events_file: str
    """Its line `oom_kill` counts the processes killed at the limit."""

    def enter(self, argv: Sequence[str]) -> list[str]:
        """The command line that starts `argv` within the group."""
        return ["/bin/sh", "-c", _ENTER, str(self.path), *argv]

    def was_exceeded(self) -> bool:
        return bool(re.search(r"^oom_kill [1-9]", (self.path / self.events_file).read_text(), re.MULTILINE))


@contextlib.contextmanager
def memory_group(limit: int) -> Iterator[MemoryGroup | None]:
    """A group for `limit` bytes, removed on leaving, when all in it must be dead; None where none can be made."""
    parent = _parent()
    if parent is None:
        yield None
        return
    with _made(parent, limit) as group:
        yield group


@contextlib.contextmanager
def _made(parent: Path, limit: int) -> Iterator[MemoryGroup]:
    path = parent / f"{_PREFIX}{os.getpid()}-{_number()}"
    path.mkdir()
    try:
        group = _group(path, limit)
        (path / group.limit_file).write_text(str(limit))
        with contextlib.suppress(OSError):  # no swap, or not counted
            (path / group.swap_file).write_text(str(group.swap_limit))
        yield group
    finally:
        _remove(path)


def _group(path: Path, limit: int) -> MemoryGroup:
    if (path / "memory.max").exists():
        return MemoryGroup(path, "memory.max", "memory.swap.max", 0, "memory.events")
    return MemoryGroup(path, "memory.limit_in_bytes", "memory.memsw.limit_in_bytes", limit, "memory.oom_control")


@cache
def _parent() -> Path | None:
    """Where groups can be made and entered, by trying. What killed runs have left there goes first."""
    for folder in _folders():
        for stale in folder.glob(f"{_PREFIX}*-*"):
            if not Path("/proc", stale.name.split("-")[1]).exists():
                with contextlib.suppress(OSError):
                    stale.rmdir()
        try:
            with _made(folder, _TRIAL_BYTES) as group:
                group.was_exceeded()
                subprocess.run(group.enter(["/bin/true"]), check=True, stderr=subprocess.DEVNULL, env={})
        except (OSError, subprocess.CalledProcessError):
            continue
        return folder
    return None


def _folders() -> Iterator[Path]:
    """This process's group and the one above, of the hierarchy that counts memory."""
    mounts = dict(_mounts())
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(",") and "memory" in mounts:
            own = mounts["memory"] / path.lstrip("/")
            yield own if own.exists() else mounts["memory"]
        elif not controllers and "unified" in mounts:
            own = mounts["unified"] / path.lstrip("/")
            for folder in (own, own.parent):
                control = folder / "cgroup.subtree_control"
                if control.exists() and "memory" in control.read_text().split():
                    yield folder


def _mounts() -> Iterator[tuple[str, Path]]:
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, where, kind, options, *_ = line.split()
        if kind == "cgroup2":
            yield "unified", Path(where)
        elif kind == "cgroup" and "memory" in options.split(","):
            yield "memory", Path(where)


def _remove(path: Path) -> None:
    deadline = time.monotonic() + _REMOVAL_S
    while True:
        try:
            path.rmdir()
        except OSError:  # busy for a moment after the last one's death
            if time.monotonic() > deadline:
                return
            time.sleep(0.005)
        else:
            return
