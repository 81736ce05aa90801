"""Ten quick programs that try what a sandbox must not let them do."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from lightning_mappa.tools.python import PythonTool
from lightning_mappa.tools.workspace import Workspaces
from lightning_mappa.types import ToolCall, ToolStatus

CANARY = "MAPPA_PROBE_CANARY"
_PROCESSES = 16

Probe = Callable[[PythonTool, Path], Awaitable[str]]
"""Why the sandbox does not hold, in one line; empty when it does."""


async def run_probes(configured: PythonTool) -> dict[str, str]:
    """Runs every probe, one after the other, isolated as `configured` but in less time; about five seconds.

    Returns:
        Name of the probe -> why the sandbox does not hold, empty when it does.

    Raises:
        ConfigError: `configured.isolation` cannot be had here.
    """
    tool = PythonTool(
        isolation=configured.isolation,
        warm=configured.warm,
        wall_s=3,
        cpu_s=3,
        memory_mb=configured.limits.memory_mb,
        processes=_PROCESSES,
        workspace_mb=8,
        tmp_mb=8,
    )
    try:
        tool.check()
        results = {}
        for name, probe in PROBES.items():
            with Workspaces().open() as workspace:
                results[name] = await probe(tool, workspace)
        return results
    finally:
        tool.close()


async def environment_hidden(tool: PythonTool, workspace: Path) -> str:
    with _canary():
        return await _run(tool, workspace, f"import os; assert {CANARY!r} not in os.environ, 'it is inherited'")


async def other_environments_hidden(tool: PythonTool, workspace: Path) -> str:
    program = """
import os
for process in ("1", str(os.getppid())):
    try:
        with open(f"/proc/{process}/environ", "rb") as file:
            assert CANARY not in file.read(), f"/proc/{process}/environ holds what the trainer's holds"
    except OSError:
        pass
"""
    with _canary() as value:
        return await _run(tool, workspace, program.replace("CANARY", repr(value.encode())))


async def network_refused(tool: PythonTool, workspace: Path) -> str:
    program = """
import socket
def reach(kind, address):
    try:
        with socket.socket(socket.AF_INET, kind) as connection:
            connection.settimeout(1)
            connection.connect(address)
    except OSError:
        return
    raise AssertionError(f"{address[0]} can be reached")
reach(socket.SOCK_STREAM, ("127.0.0.1", PORT))
reach(socket.SOCK_DGRAM, ("192.0.2.1", 53))
"""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return await _run(tool, workspace, program.replace("PORT", str(server.getsockname()[1])))


async def home_hidden(tool: PythonTool, workspace: Path) -> str:
    home = Path.home()
    folder = home if os.access(home, os.W_OK) else None
    program = """
try:
    open(SECRET)
except OSError:
    pass
else:
    raise AssertionError("a file there is readable")
"""
    with tempfile.NamedTemporaryFile(prefix=".mappa-probe-", dir=folder) as secret:
        os.chmod(secret.name, 0o644)
        return await _run(tool, workspace, program.replace("SECRET", repr(secret.name)))


async def writing_outside_refused(tool: PythonTool, workspace: Path) -> str:
    program = """
import os
for folder in (OUTSIDE, os.path.dirname(os.__file__), "/usr", "/etc", "/"):
    name = os.path.join(folder, NAME)
    try:
        open(name, "x").close()
    except OSError:
        continue
    os.unlink(name)
    raise AssertionError(f"{folder} is writable")
"""
    with tempfile.TemporaryDirectory(prefix="mappa-probe-") as outside:
        os.chmod(outside, 0o777)
        name = f"mappa-probe-{secrets.token_hex(8)}"
        return await _run(tool, workspace, program.replace("OUTSIDE", repr(outside)).replace("NAME", repr(name)))


async def processes_limited(tool: PythonTool, workspace: Path) -> str:
    program = f"""
import os, signal
for _ in range({4 * _PROCESSES}):
    if os.fork() == 0:
        signal.pause()
"""
    return await _run(tool, workspace, program, ToolStatus.PROCESS_LIMIT)


async def memory_limited(tool: PythonTool, workspace: Path) -> str:
    return await _run(tool, workspace, f"bytearray({2 * tool.limits.memory_mb} << 20)", ToolStatus.MEMORY)


async def time_limited(tool: PythonTool, workspace: Path) -> str:
    begin = time.monotonic()
    program = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(60)"
    reason = await _run(tool, workspace, program, ToolStatus.TIMEOUT)
    late = time.monotonic() - begin - tool.limits.wall_s
    return reason or (f"it came {late:.0f} s late" if late > 10 else "")


async def daemons_dead(tool: PythonTool, workspace: Path) -> str:
    program = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        while True:
            with open("ticks", "a") as file:
                file.write(".")
            time.sleep(0.02)
    os._exit(0)
while not os.path.exists("ticks"):
    time.sleep(0.01)
"""
    if reason := await _run(tool, workspace, program):
        return reason
    ticks = workspace / "ticks"
    size = ticks.stat().st_size
    await asyncio.sleep(0.3)
    return "" if ticks.stat().st_size == size else "one still writes after its program ended"


async def workspace_persists(tool: PythonTool, workspace: Path) -> str:
    reason = await _run(tool, workspace, "with open('note', 'w') as file: file.write('kept')")
    return reason or await _run(tool, workspace, "assert open('note').read() == 'kept'")


PROBES: Mapping[str, Probe] = {
    "environment hidden": environment_hidden,
    "/proc/1/environ hidden": other_environments_hidden,
    "network refused": network_refused,
    "home hidden": home_hidden,
    "writing outside refused": writing_outside_refused,
    "processes limited": processes_limited,
    "memory limited": memory_limited,
    "time limited": time_limited,
    "daemons dead": daemons_dead,
    "workspace persists": workspace_persists,
}


async def _run(tool: PythonTool, workspace: Path, program: str, expected: ToolStatus = ToolStatus.OK) -> str:
    result = await tool.run(ToolCall(name=tool.name, arguments={"code": program}), workspace)
    if result.status is expected:
        return ""
    last = result.stderr.strip().splitlines()[-1:]
    return (
        last[0].removeprefix("AssertionError: ")
        if last
        else f"ended with {result.status} instead of {expected}; {result.reason}"
    )


@contextmanager
def _canary() -> Iterator[str]:
    """A secret in this process's environment."""
    os.environ[CANARY] = value = secrets.token_hex(16)
    try:
        yield value
    finally:
        del os.environ[CANARY]
