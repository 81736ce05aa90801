"""The Python tool: runs the fenced python of an agent's text in a sandbox."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from lightning_mappa.errors import ConfigError
from lightning_mappa.tools.changes import changes_between
from lightning_mappa.tools.code_blocks import code_blocks
from lightning_mappa.tools.collector import CollectLimits, Listing, list_files
from lightning_mappa.tools.ladder import ISOLATIONS, find_sandbox
from lightning_mappa.tools.outcome import as_result
from lightning_mappa.tools.process import run_program
from lightning_mappa.tools.sandbox import Limits, Sandbox
from lightning_mappa.tools.warm import WarmBubblewrap, is_module_name, warm_up
from lightning_mappa.types import ToolCall, ToolResult


class PythonTool:
    """Implements `tools.base.Tool`. Limits are those of `sandbox.Limits`; one instance serves all episodes.

    Args:
        isolation: `bubblewrap` takes namespaces, `landlock` the kernel's access rules, `auto` the first of the two
            that holds; each refuses to work where it does not. `none` runs programs as this user with all its
            rights but an empty environment.
        warm: Modules that programs find imported, e.g. `["numpy", "pandas", "sklearn"]`: each program is forked from
            an interpreter that holds them, inside the sandbox. Needs bubblewrap, and as root the right to mount.
        output_chars: Of each stream shown to agents and coach, half from its head and half from its tail.
        max_concurrency: Programs at a time, the others wait in order; None takes the cores this process may use.

    Raises:
        ConfigError: a value out of range.
    """

    def __init__(
        self,
        *,
        name: str = "python",
        isolation: str = "auto",
        warm: Sequence[str] = (),
        wall_s: float = 10.0,
        cpu_s: int = 10,
        memory_mb: int = 1024,
        processes: int = 64,
        open_files: int = 256,
        output_bytes: int = 1 << 20,
        output_chars: int = 4000,
        workspace_mb: int = 256,
        workspace_files: int = 10_000,
        tmp_mb: int = 64,
        max_concurrency: int | None = None,
    ) -> None:
        if isolation not in ISOLATIONS:
            raise ConfigError(f"tools.python.isolation={isolation}: must be one of {', '.join(ISOLATIONS)}.")
        if isinstance(warm, str) or not all(is_module_name(name) for name in warm):
            raise ConfigError(f"tools.python.warm={warm}: must be a list of module names, like [numpy,pandas].")
        if output_chars < 2:
            raise ConfigError(f"tools.python.output_chars={output_chars}: must be at least 2.")
        if max_concurrency is not None and max_concurrency < 1:
            raise ConfigError(f"tools.python.max_concurrency={max_concurrency}: must be at least 1, or null.")
        self.name = name
        self.limits = Limits(
            wall_s=wall_s,
            cpu_s=cpu_s,
            memory_mb=memory_mb,
            processes=processes,
            open_files=open_files,
            output_bytes=output_bytes,
            workspace_mb=workspace_mb,
            workspace_files=workspace_files,
            tmp_mb=tmp_mb,
        )
        self.isolation = isolation
        self.warm = tuple(warm)
        self.output_chars = output_chars
        self.max_concurrency = max_concurrency or len(os.sched_getaffinity(0))

    def check(self) -> str:
        """Finds the isolation that holds on this machine, once, by a probe (under a second), and returns its name.

        Raises:
            ConfigError: there is none, or none for warm programs, or a module to import fails; names the fix.
        """
        return self.tier

    @property
    def tier(self) -> str:
        """The isolation that programs run under, for manifests; it is on every `ToolResult` too. Probes as `check`."""
        return self._sandbox.tier

    def parse(self, text: str) -> list[ToolCall]:
        return [ToolCall(name=self.name, arguments={"code": code}) for code in code_blocks(text)]

    async def run(self, call: ToolCall, workspace: Path) -> ToolResult:
        """Runs `call.arguments["code"]` with `workspace` as its working folder, in a thread of the tool's own.

        Cancelling kills the program and waits until it is dead.

        Raises:
            ConfigError: no isolation is available.
        """
        cancelled = threading.Event()
        code = str(call.arguments["code"])
        future = self._threads.submit(self._run, code, Path(workspace), cancelled)
        running = asyncio.wrap_future(future)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            cancelled.set()
            if not future.cancel():
                await asyncio.wait([running])
            raise

    def close(self) -> None:
        """Waits for programs in flight, ends the tool's threads and warm interpreter. A later `run` starts new ones."""
        if (threads := self.__dict__.pop("_threads", None)) is not None:
            threads.shutdown()
        if isinstance(sandbox := self.__dict__.get("_sandbox"), WarmBubblewrap):
            sandbox.close()

    def _run(self, code: str, workspace: Path, cancelled: threading.Event) -> ToolResult:
        program = code.encode("utf-8", errors="replace")
        before = self._files(workspace)
        outcome = run_program(self._sandbox, program, workspace, self.limits, cancelled)
        result = as_result(outcome, self.limits, self.output_chars, self.tier)
        return replace(result, files=changes_between(before, self._files(workspace)))

    def _files(self, workspace: Path) -> Listing:
        """Nothing where the folder cannot be opened: is it gone, the sandbox says so; did a program lock it, then
        its files are out of everybody's reach."""
        size = self.limits.workspace_mb << 20
        try:
            return list_files(workspace, CollectLimits(file_bytes=size, total_bytes=size))
        except OSError:
            return Listing(files=(), refused=(), complete=False)

    @cached_property
    def _sandbox(self) -> Sandbox:
        found = find_sandbox(self.isolation, self.limits)
        return warm_up(found, self.warm, self.limits) if self.warm else found

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self.max_concurrency, thread_name_prefix=f"tool-{self.name}")
