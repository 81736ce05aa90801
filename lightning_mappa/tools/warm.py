"""Programs that begin with modules imported: forks of an interpreter that waits in a sandbox of its own.

What is paid once is the import. Each run still gets namespaces, mounts, an uid and limits of its own; see
`warm_server` for how, and `warm_client` for what stands for it here.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from lightning_mappa.errors import ConfigError
from lightning_mappa.tools.bubblewrap import PROGRAM, WORKSPACE, Bubblewrap, file_system, memory_file, own
from lightning_mappa.tools.interpreter import interpreter_paths
from lightning_mappa.tools.ladder import probe
from lightning_mappa.tools.sandbox import Launch, Limits, Sandbox, program_environment, resource_limits, site_packages
from lightning_mappa.tools.seccomp import seccomp_filter

_SERVER = Path(__file__).with_name("warm_server.py").read_text(encoding="utf-8")
_LAUNCHER = Path(__file__).with_name("launcher.py").read_text(encoding="utf-8")
_CLIENT = str(Path(__file__).with_name("warm_client.py"))
_BOOT = """
import sys, types
server = types.ModuleType("server")
exec(sys.argv[1], vars(server))
server.run(*sys.argv[2:])
"""
_CAPABILITIES = ("SYS_ADMIN", "NET_ADMIN", "SETUID", "SETGID", "SETPCAP")
"""As root: for namespaces and mounts, for the loopback device, to give root up. Else a user namespace has them all."""
_IMPORT_S = 120.0
_END_S = 10.0


class WarmBubblewrap:
    """Implements `sandbox.Sandbox` on an interpreter that has imported `modules`, started when first needed.

    When it dies the programs that run in it end as failures of the sandbox, and the next launch starts another one.
    """

    def __init__(self, cold: Bubblewrap, modules: Sequence[str]) -> None:
        self._cold = cold
        self._modules = tuple(modules)
        self._server: _Server | None = None
        self._lock = threading.Lock()

    @property
    def tier(self) -> str:
        return f"{self._cold.tier}, warm"

    @contextlib.contextmanager
    def launch(self, program: bytes, workspace: Path, limits: Limits, status_fd: int) -> Iterator[Launch]:
        with contextlib.ExitStack() as stack:
            near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            stack.enter_context(near)
            near.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)  # tells who sends
            with far, contextlib.ExitStack() as handed_over:
                program_fd = memory_file(handed_over, program)
                request = {
                    "owner": own(workspace) if self._cold.drop_uid else None,
                    "tmp_bytes": limits.tmp_mb << 20,
                    "limits": resource_limits(limits),
                    "filter": seccomp_filter().hex(),
                }
                self._send(json.dumps(request).encode(), [far.fileno(), status_fd, program_fd])
            descriptors = (near.fileno(), status_fd)
            yield Launch(
                argv=[sys.executable, "-I", "-S", _CLIENT, *map(str, descriptors), str(workspace)],
                env={},
                cwd=Path("/"),
                pass_fds=descriptors,
            )

    def close(self) -> None:
        """Ends the interpreter, and with it what runs in it. A later launch starts a new one."""
        with self._lock:
            server, self._server = self._server, None
        if server is not None:
            server.close()

    def _send(self, request: bytes, descriptors: list[int]) -> None:
        """To the server, or where that is dead to another one.

        Raises:
            OSError: none could be started.
        """
        with self._lock:
            if self._server is not None:
                try:
                    self._server.send(request, descriptors)
                    return
                except OSError:
                    self._server.close()
                    self._server = None
            self._server = _Server(self._cold, self._modules)
            self._server.send(request, descriptors)


class _Server:
    def __init__(self, cold: Bubblewrap, modules: Sequence[str]) -> None:
        with contextlib.ExitStack() as stack:
            self._control, inner = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            stack.enter_context(self._control)
            errors = stack.enter_context(tempfile.TemporaryFile())
            with inner:
                self._popen = subprocess.Popen(
                    _command(cold, inner.fileno(), modules),
                    env={},
                    cwd="/",
                    pass_fds=(inner.fileno(),),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=errors,
                    start_new_session=True,
                )
            stack.callback(self._end)
            self._await_ready(errors)
            self._resources = stack.pop_all()

    def send(self, request: bytes, descriptors: list[int]) -> None:
        socket.send_fds(self._control, [request], descriptors)

    def close(self) -> None:
        self._resources.close()

    def _await_ready(self, errors: IO[bytes]) -> None:
        self._control.settimeout(_IMPORT_S)
        try:
            answer = self._control.recv(1 << 13).decode(errors="replace")
        except TimeoutError:
            answer = f"the imports took longer than {_IMPORT_S:g} s"
        self._control.settimeout(None)
        if answer != "ready":
            errors.seek(0)
            last = errors.read().decode(errors="replace").strip().splitlines()[-1:]
            raise OSError(answer or "".join(last) or "the warm interpreter did not start")

    def _end(self) -> None:
        """By the end of its socket it ends itself, as it would if this process died."""
        self._control.close()
        try:
            self._popen.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()


def warm_up(cold: Sandbox, modules: Sequence[str], limits: Limits) -> WarmBubblewrap:
    """A warm sandbox whose isolation a probe program has confirmed.

    Raises:
        ConfigError: a module cannot be imported or must not be shared by forks; or programs cannot be isolated.
    """
    shown = f"tools.python.warm=[{','.join(modules)}]"
    if not isinstance(cold, Bubblewrap) or cold.user_namespace == cold.drop_uid or not cold.mount_proc:
        raise ConfigError(
            f"{shown}: warm programs need namespaces and a /proc of their own, as root the right to mount, and here "
            f"the isolation is `{cold.tier}`: set tools.python.warm=[]."
        )
    if any(path.startswith("/tmp/") for path in interpreter_paths()):
        raise ConfigError(f"{shown}: the interpreter lies below /tmp, which each program has anew: set it to [].")
    sandbox = WarmBubblewrap(cold, modules)
    reason = probe(sandbox, limits)
    if reason:
        sandbox.close()
        raise ConfigError(f"{shown}: {reason}: fix it or set tools.python.warm=[].")
    return sandbox


def is_module_name(name: object) -> bool:
    return isinstance(name, str) and all(part.isidentifier() for part in name.split("."))


def _command(cold: Bubblewrap, control_fd: int, modules: Sequence[str]) -> list[str]:
    if cold.user_namespace:
        rights = ["--unshare-user"]
    else:
        rights = [flag for name in _CAPABILITIES for flag in ("--cap-add", f"CAP_{name}")]
    environment = itertools.chain.from_iterable(("--setenv", *item) for item in program_environment(WORKSPACE).items())
    return [
        cold.binary,
        *("--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"),
        # With the first process of its namespace all runs die, whatever ends it.
        *("--as-pid-1", "--new-session", "--hostname", "sandbox", "--cap-drop", "ALL"),
        *rights,
        *("--perms", "1777", "--size", "4096", "--tmpfs", "/tmp", *file_system(), "--proc", "/proc", "--dev", "/dev"),
        *("--size", "4096", "--tmpfs", "/dev/shm", "--remount-ro", "/dev", "--dir", WORKSPACE),
        *("--ro-bind", "/dev/null", PROGRAM, "--remount-ro", "/"),
        *environment,
        *("--", sys.executable, "-S", "-s", "-P", "-c", _BOOT, _SERVER, str(control_fd), _LAUNCHER, site_packages()),
        *modules,
    ]
