"""Landlock: the tier for machines without namespaces. The kernel refuses files, signals and sockets one by one."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from lightning_mappa.tools.bubblewrap import own
from lightning_mappa.tools.interpreter import PACKAGE, interpreter_paths
from lightning_mappa.tools.sandbox import Launch, Limits, program_environment, python_command
from lightning_mappa.tools.seccomp import seccomp_filter

_CONFINE = Path(__file__).with_name("confine.py").read_text(encoding="utf-8")
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/alternatives")
_DEVICES = ("/dev/zero", "/dev/random", "/dev/urandom")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Landlock:
    """Only the workspace is writable, temporary files lie in it, and of the rest only an interpreter is readable.

    Weaker than namespaces: whether a path exists can be asked, though nothing of it read, and no socket of any kind
    can be made, so that multiprocessing's managers do not work; neither do /proc and shared memory. A program
    cannot change permissions or times, not even of its own files.
    """

    drop_uid: bool
    """For root, for which no process limit holds."""

    @property
    def tier(self) -> str:
        return "landlock, own uid" if self.drop_uid else "landlock"

    @contextlib.contextmanager
    def launch(self, program: bytes, workspace: Path, limits: Limits, status_fd: int) -> Iterator[Launch]:
        uid = own(workspace) if self.drop_uid else None
        if uid is None:  # the limit is one of the user, who has other processes
            limits = dataclasses.replace(limits, processes=limits.processes + _threads_of(os.getuid()))
        with tempfile.TemporaryDirectory(prefix="mappa-program-") as folder:
            os.chmod(folder, 0o711)
            path = Path(folder, "program.py")
            path.write_bytes(program)
            path.chmod(0o444)
            readable, listed = _without_package([*_SYSTEM, *interpreter_paths()])
            spec = {
                "parent": os.getpid(),
                "uid": uid,
                "folder": str(workspace),
                "read": [*readable, *filter(os.path.exists, _DEVICES), str(path)],
                "listed": listed,
                "write": [str(workspace), "/dev/null"],
                "filter": seccomp_filter(shared=True).hex(),
            }
            command = python_command(str(path), limits, status_fd)
            yield Launch(
                argv=[sys.executable, "-I", "-S", "-c", _CONFINE, json.dumps(spec), *command],
                env={**program_environment(str(workspace)), "TMPDIR": str(workspace)},
                cwd=Path("/"),
                pass_fds=(status_fd,),
                stop_signal=signal.SIGTERM,
            )


def _without_package(paths: Iterable[str]) -> tuple[list[str], list[str]]:
    """What of `paths` to make readable, and the folders of which only to show the names.

    The task generators and their seeds would tell the answers; no rule takes away what another one on a folder
    above has given, so that everything beside the package is named.
    """
    readable, listed = [], []
    for path in filter(os.path.exists, paths):
        real = Path(os.path.realpath(path))
        if not PACKAGE.is_relative_to(real):
            readable.append(path)
            continue
        folder = real
        listed.append(str(real))
        for step in PACKAGE.relative_to(real).parts:
            readable += [entry.path for entry in os.scandir(folder) if entry.name != step and os.path.exists(entry)]
            folder /= step
    return readable, listed


def _threads_of(uid: int) -> int:
    """Processes and threads of one user, as RLIMIT_NPROC counts them."""
    count = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.stat(f"/proc/{name}").st_uid == uid:
                count += len(os.listdir(f"/proc/{name}/task"))
        except OSError:
            continue
    return count
