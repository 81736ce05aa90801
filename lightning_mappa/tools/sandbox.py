"""What stands between a program and the machine.

A `Sandbox` turns one program into one command line; `process.run_program` runs it. Which sandbox holds on this
machine is found by probing (`ladder.find_sandbox`), never guessed.
"""

from __future__ import annotations

import os
import signal
import site
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from lightning_mappa.errors import ConfigError

_LAUNCHER = Path(__file__).with_name("launcher.py").read_text(encoding="utf-8")
_MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one program may use. All positive."""

    wall_s: float = 10.0
    """Counted from the moment the program starts, not while it waits for a slot or for the sandbox."""
    cpu_s: int = 10
    memory_mb: int = 1024
    """Address space of each process, and what all of them hold together."""
    processes: int = 64
    """Processes and threads alive at once."""
    open_files: int = 256
    output_bytes: int = 1 << 20
    """Per stream; a program that writes more is stopped."""
    workspace_mb: int = 256
    """Of one file, and of all files of the workspace together."""
    workspace_files: int = 10_000
    tmp_mb: int = 64
    """Of /tmp and of /dev/shm, each in memory."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not getattr(self, name) > 0:
                raise ConfigError(f"tools.python.{name}={getattr(self, name)}: must be above 0.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A command line ready to start."""

    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: Path
    pass_fds: Sequence[int]
    stop_signal: int = signal.SIGKILL
    """What makes the process started end, and all others with it: SIGKILL goes to its whole group."""


class Sandbox(Protocol):
    @property
    def tier(self) -> str:
        """What kind of isolation this is, in a few words, for manifests and transcripts."""
        ...

    def launch(self, program: bytes, workspace: Path, limits: Limits, status_fd: int) -> AbstractContextManager[Launch]:
        """Prepares one start of `program` in `workspace`; to be left when the program is dead.

        `status_fd` is the write end of a pipe that carries lines: `ready` when the program starts, and a JSON
        object with `child-pid` where the process whose death ends all others is not the one started.

        Raises:
            OSError: a file or descriptor could not be made.
        """
        ...


@dataclass(frozen=True, slots=True)
class PlainProcess:
    """No isolation at all: resource limits and an empty environment only."""

    tier: str = "none"

    @contextmanager
    def launch(self, program: bytes, workspace: Path, limits: Limits, status_fd: int) -> Iterator[Launch]:
        with tempfile.NamedTemporaryFile(prefix="program-", suffix=".py") as file:
            file.write(program)
            file.flush()
            yield Launch(
                argv=python_command(file.name, limits, status_fd),
                env=program_environment(str(workspace)),
                cwd=workspace,
                pass_fds=(status_fd,),
            )


def python_command(program_path: str, limits: Limits, status_fd: int) -> list[str]:
    """This interpreter with its packages, but neither the working folder nor the user's packages on its path."""
    # -P -s and not -I: the environment is ours, and -I would also ignore PYTHONHASHSEED.
    flags = ["-S", "-s", "-P", "-c", _LAUNCHER]
    return [sys.executable, *flags, str(status_fd), program_path, site_packages(), *resource_limits(limits)]


def resource_limits(limits: Limits) -> list[str]:
    """In the order of `launcher.LIMITS`."""
    values = (
        limits.cpu_s,
        limits.memory_mb * _MIB,
        limits.workspace_mb * _MIB,
        limits.open_files,
        limits.processes,
        0,
    )
    return [str(value) for value in values]


def site_packages() -> str:
    return ":".join(path for path in site.getsitepackages() if os.path.isdir(path))


def program_environment(home: str) -> dict[str, str]:
    """All that a program finds in its environment; nothing is inherited.

    Sets print in the same order in every run (PYTHONHASHSEED), and what was printed before a kill is there.
    """
    threads = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
    return {
        "PATH": f"{os.path.dirname(sys.executable)}:/usr/local/bin:/usr/bin:/bin",
        "HOME": home,
        "TMPDIR": "/tmp",
        "LANG": "C.UTF-8",
        "PYTHONHASHSEED": "0",
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        **dict.fromkeys(threads, "1"),
        # Each of glibc's per-thread arenas would reserve 64 MB of the address space that is limited.
        "MALLOC_ARENA_MAX": "2",
    }
