"""The harness under attack, in a process of its own: it owns the secrets, runs the programs, and says what it is left
with. Started by `harness.py`; reads a JSON object a line, answers with one.

As root it may be told to become an unprivileged user. The interpreter may lie where that user cannot go, in root's
home: then this process takes a mount namespace of its own, in which the same paths are public and nothing else of
those folders is there.
"""

from __future__ import annotations

import asyncio
import ctypes
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

NOBODY = 65534
NEW_MOUNTS = 0x00020000
SUBREAPER = 36
libc = ctypes.CDLL(None, use_errno=True)


def make_public(paths: list[str]) -> None:
    """Within this process and its children, by one empty folder in place of each private one on the way."""
    private: dict[str, list[str]] = {}
    for path in sorted({os.path.realpath(path) for path in paths if os.path.isdir(path)}):
        closed = [folder for folder in reversed(Path(path).parents) if not os.stat(folder).st_mode & 0o001]
        if closed:
            private.setdefault(str(closed[0]), []).append(path)
    if not private:
        return
    if libc.unshare(NEW_MOUNTS) != 0:
        raise OSError(ctypes.get_errno(), "no mount namespace")
    _mount("--make-rprivate", "/")
    for top, inner in private.items():
        with tempfile.TemporaryDirectory() as hold:
            for number, path in enumerate(inner):
                (Path(hold) / str(number)).mkdir()
                _mount("--rbind", path, f"{hold}/{number}")
            _mount("-t", "tmpfs", "-o", "mode=755,size=1m", "tmpfs", top)
            for number, path in enumerate(inner):
                os.makedirs(path, mode=0o755, exist_ok=True)
                _mount("--move", f"{hold}/{number}", path)


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True, capture_output=True)


def become(identity: str) -> None:
    if os.geteuid() != 0:
        return
    repository = str(Path(__file__).parents[2])
    make_public([sys.prefix, sys.base_prefix, repository, *(path for path in sys.path if path)])
    if identity == "nobody":
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        libc.prctl(4, 1, 0, 0, 0)  # as an ordinary process of that user: its /proc files are its own


class Server:
    def __init__(self, tier: str) -> None:
        from lightning_mappa.tools import ladder
        from lightning_mappa.tools.bubblewrap import Bubblewrap
        from lightning_mappa.tools.memory import family
        from lightning_mappa.tools.python import PythonTool
        from lightning_mappa.tools.sandbox import Limits, Sandbox
        from lightning_mappa.tools.warm import WarmBubblewrap
        from lightning_mappa.tools.workspace import Workspaces

        self.sandbox: Sandbox
        self._make_tool = PythonTool
        self._tools: dict[str, Any] = {}
        self._workspaces = Workspaces()
        self._open: dict[str, ExitStack] = {}
        self._resident = {os.getpid()}
        self.reason = f"this machine has no tier {tier!r}"
        for sandbox in ladder._candidates("auto"):
            if sandbox.tier == tier.removesuffix(", warm"):
                self.sandbox = sandbox
                if tier.endswith(", warm"):
                    assert isinstance(sandbox, Bubblewrap)
                    self.sandbox = WarmBubblewrap(sandbox, ["json"])
                self.reason = ladder.probe(self.sandbox, Limits(processes=24))
                if not self.reason:
                    self._resident |= set(family(os.getpid()))  # a warm interpreter stays
                    return

    def open(self) -> str:
        stack = ExitStack()
        path = str(stack.enter_context(self._workspaces.open()))
        self._open[path] = stack
        return path

    def close(self, path: str) -> bool:
        self._open.pop(path).close()
        return not os.path.exists(path)

    def run(self, programs: list[str], workspaces: list[str], limits: dict[str, Any]) -> list[dict[str, Any]]:
        """All at once, as far as the limits let them."""
        key = json.dumps(limits, sort_keys=True)
        if key not in self._tools:
            self._tools[key] = tool = self._make_tool(**limits)
            tool.__dict__["_sandbox"] = self.sandbox
        return asyncio.run(self._gather(self._tools[key], programs, workspaces))

    async def _gather(self, tool: Any, programs: list[str], workspaces: list[str]) -> list[dict[str, Any]]:
        from lightning_mappa.types import ToolCall

        calls = [ToolCall(name="python", arguments={"code": program}) for program in programs]
        runs = (tool.run(call, Path(workspace)) for call, workspace in zip(calls, workspaces, strict=True))
        return [dataclasses.asdict(result) for result in await asyncio.gather(*runs)]

    def state(self) -> dict[str, Any]:
        """What a run must leave as it was. A process that got away is found here, as this one reaps orphans."""
        from lightning_mappa.tools import cgroup
        from lightning_mappa.tools.memory import family

        status = Path("/proc/self/status").read_text().split("VmRSS:")[1].split()[0]
        return {
            "processes": [_describe(pid) for pid in family(os.getpid()) if pid not in self._resident],
            "descriptors": sorted(os.listdir("/proc/self/fd")),
            "mounts": len(Path("/proc/self/mountinfo").read_text().splitlines()),
            "memory_mb": int(status) // 1024,
            "groups": sum(len(list(folder.glob(f"mappa-{os.getpid()}-*"))) for folder in cgroup._folders()),
        }

    def folders(self) -> list[str]:
        """What there is in the folder for temporary files but workspaces in use."""
        used = {Path(path).name for path in self._open}
        return sorted(set(os.listdir(tempfile.gettempdir())) - used)


def _describe(pid: int) -> str:
    fields = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return f"{fields['Name']} {fields['State']}"


def main() -> None:
    identity, tier = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    libc.prctl(SUBREAPER, 1, 0, 0, 0)
    try:
        become(identity)
        server = Server(tier)
        reason = server.reason
    except (OSError, subprocess.CalledProcessError) as error:
        reason = f"the harness cannot run as {identity}: {error}"
    print(json.dumps({"reason": reason}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        answer = getattr(server, request.pop("do"))(**request)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
