"""Looking at processes that may end while one looks."""

from collections.abc import Iterable

import psutil


def living(pids: Iterable[int]) -> list[psutil.Process]:
    """The processes of `pids` that had not ended when they were looked up."""
    found = []
    for pid in pids:
        try:
            found.append(psutil.Process(pid))
        except psutil.NoSuchProcess:
            continue
    return found


def named(processes: Iterable[psutil.Process]) -> list[tuple[str, psutil.Process]]:
    """Each process with its name, without those that ended meanwhile."""
    found = []
    for process in processes:
        try:
            found.append((process.name(), process))
        except psutil.NoSuchProcess:
            continue
    return found
