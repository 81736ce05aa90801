"""Speaks to `server.py`, and keeps the files that no program may see or change."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_mappa.types import ToolResult, ToolStatus

CANARY = "canary-7c1f90"
LIMITS: Mapping[str, Any] = {
    "wall_s": 10,
    "cpu_s": 20,
    "memory_mb": 256,
    "processes": 24,
    "output_bytes": 100_000,
    "output_chars": 2000,
    "workspace_mb": 8,
    "workspace_files": 300,
    "tmp_mb": 4,
}


@dataclass(slots=True)
class Harness:
    """One server on one tier as one user."""

    identity: str
    tier: str
    outside: Path
    """Holds what the harness owns and no program may reach; its own home among it."""
    server: subprocess.Popen[str]
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def ask(self, do: str, **arguments: Any) -> Any:
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        with self._lock:
            print(json.dumps({"do": do, **arguments}), file=self.server.stdin, flush=True)
            return json.loads(self.server.stdout.readline())

    @contextmanager
    def workspace(self) -> Iterator[str]:
        path = self.ask("open")
        yield path
        assert self.ask("close", path=path), "the workspace was not removed"

    def run_all(self, programs: Sequence[str], workspaces: Sequence[str], **limits: Any) -> list[ToolResult]:
        limits = {**LIMITS, **limits}
        told = self.ask("run", programs=list(programs), workspaces=list(workspaces), limits=limits)
        return [ToolResult(**{**fields, "status": ToolStatus(fields["status"])}) for fields in told]

    def run(self, program: str, workspace: str, **limits: Any) -> ToolResult:
        (result,) = self.run_all([program], [workspace], **limits)
        return result

    def state(self) -> dict[str, Any]:
        return self.ask("state")


def start(identity: str, tier: str, outside: Path) -> tuple[Harness, str]:
    """A harness, and why it cannot do what was asked, empty when it can."""
    _plant(outside)
    if identity == "nobody" and os.geteuid() == 0:
        for path in (outside, *outside.rglob("*")):
            os.lchown(path, 65534, 65534)
    temporary = outside.parent / "tmp"  # no other run clears up in it
    temporary.mkdir()
    temporary.chmod(0o1777)
    for folder in (outside, outside.parent):
        folder.chmod(0o755)  # what keeps programs out is the sandbox
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.sandbox.server", identity, tier],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
        env={
            **os.environ,
            "HOME": str(outside),
            "TMPDIR": str(temporary),
            "ANTHROPIC_API_KEY": CANARY,
            "OMP_NUM_THREADS": "1",
        },
    )
    assert server.stdout is not None
    told = json.loads(server.stdout.readline() or '{"reason": "the harness did not start"}')
    return Harness(identity=identity, tier=tier, outside=outside, server=server), told["reason"]


def _plant(outside: Path) -> None:
    for name in (
        ".config/anthropic/credentials.json",
        ".aws/credentials",
        ".cache/huggingface/token",
        ".env",
        "run/checkpoints/last.ckpt",
        "run/labels.csv",
        "run/metrics.json",
    ):
        path = outside / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(CANARY)


def contents(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    """Name, mode, time of change and bytes of all that lies in it."""
    return {
        str(path.relative_to(folder)): (
            path.lstat().st_mode,
            path.lstat().st_mtime_ns,
            path.read_bytes() if path.is_file() else b"",
        )
        for path in sorted(folder.rglob("*"))
    }
