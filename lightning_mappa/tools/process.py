"""One program from its start to the death of the last process it made."""

from __future__ import annotations

import contextlib
import json
import os
import select
import selectors
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import IO

from lightning_mappa.tools.cgroup import memory_group
from lightning_mappa.tools.memory import holds_more_than, unlinked_bytes
from lightning_mappa.tools.outcome import Outcome
from lightning_mappa.tools.sandbox import Limits, Sandbox
from lightning_mappa.tools.workspace import exceeds
from lightning_mappa.types import ToolStatus

_START_S = 60.0
"""For the sandbox to come up, on a machine however busy."""
_DEATH_S = 30.0
"""For killed processes to be gone."""
_TICK_S = 0.1
"""Between two looks at memory and at a cancellation."""
_COUNT_S = 0.25
"""Between two counts of the workspace."""
_CHUNK = 1 << 16


def run_program(
    sandbox: Sandbox, program: bytes, workspace: Path, limits: Limits, cancelled: threading.Event
) -> Outcome:
    """Runs `program` and returns when nothing of it is alive any more. Blocks: call it in a thread.

    Setting `cancelled` kills it within a tenth of a second. Failures of the sandbox are outcomes that have not
    started, with a reason; nothing is raised for what a program did.
    """
    try:
        process = _Process(sandbox, program, workspace, limits)
    except OSError as error:
        return Outcome(started=False, reason=f"{type(error).__name__}: {error}")
    try:
        process.watch(cancelled)
    finally:
        process.end()
    return process.outcome()


class _Process:
    def __init__(self, sandbox: Sandbox, program: bytes, workspace: Path, limits: Limits) -> None:
        self._workspace = workspace
        self._limits = limits
        self._stopped: ToolStatus | None = None
        self._reason = ""
        self._output: dict[str, bytearray] = {"stdout": bytearray(), "stderr": bytearray(), "status": bytearray()}
        self._namespaced = False
        self._root_fd: int | None = None
        """Of the namespace's pid 1, whose death ends all others; None without one, and when it is dead already."""
        self._started_at: float | None = None
        self._ended_at = 0.0
        with contextlib.ExitStack() as stack:
            status_fd, write_fd = os.pipe()
            status = stack.enter_context(os.fdopen(status_fd, "rb", buffering=0))
            stack.callback(os.close, write_fd)
            launch = stack.enter_context(sandbox.launch(program, workspace, limits, write_fd))
            self._group = stack.enter_context(memory_group(limits.memory_mb << 20))
            self._popen = subprocess.Popen(
                launch.argv if self._group is None else self._group.enter(launch.argv),
                env=launch.env,
                cwd=launch.cwd,
                pass_fds=launch.pass_fds,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
            )
            self._stop_signal = launch.stop_signal
            self._resources = stack.pop_all()
        self._ancestor = self._popen.pid
        """Of all that the program starts."""
        self._exit_fd = os.pidfd_open(self._popen.pid)
        assert self._popen.stdout is not None
        assert self._popen.stderr is not None
        self._pipes: dict[str, IO[bytes]] = {
            "stdout": self._popen.stdout,
            "stderr": self._popen.stderr,
            "status": status,
        }
        for pipe in self._pipes.values():
            os.set_blocking(pipe.fileno(), False)
            self._resources.enter_context(pipe)
        self._resources.callback(os.close, self._exit_fd)

    def watch(self, cancelled: threading.Event) -> None:
        """Drains the pipes until the program exits or is past a limit."""
        begin = time.monotonic()
        next_look = next_count = begin + _TICK_S
        with selectors.DefaultSelector() as selector:
            selector.register(self._exit_fd, selectors.EVENT_READ)
            for name, pipe in self._pipes.items():
                selector.register(pipe, selectors.EVENT_READ, name)
            while self._stopped is None and not self._reason:
                now = time.monotonic()
                if self._started_at is None:
                    deadline = begin + _START_S
                else:
                    deadline = self._started_at + self._limits.wall_s
                if now >= deadline:
                    self._stop_at_deadline()
                    return
                if cancelled.is_set():
                    self._reason = "cancelled"
                    return
                if now >= next_count:
                    self._check_workspace()
                    next_count = time.monotonic() + _COUNT_S
                if now >= next_look:
                    self._check_memory()
                    next_look = time.monotonic() + _TICK_S
                for key, _ in selector.select(min(_TICK_S, deadline - now)):
                    if key.data is None:
                        return
                    if not self._read(key.data):
                        selector.unregister(key.fileobj)

    def end(self) -> None:
        """Kills what is left, waits until it is dead, reads what it had written, closes every descriptor."""
        self._ended_at = time.monotonic()
        try:
            self._drain("status")
            self._kill()
            self._await_death()
            for name in ("stdout", "stderr"):
                self._drain(name)
            if self._stopped is None and self._started_at is not None:
                if self._group is not None and self._group.was_exceeded():
                    self._stopped = ToolStatus.MEMORY
                else:
                    self._check_workspace()
        finally:
            self._resources.close()

    def outcome(self) -> Outcome:
        code = self._popen.returncode
        if self._namespaced and code is not None:
            if code > 128:
                code = 128 - code  # bwrap says 128 + n for a program killed by signal n
            elif code < 0 and self._stopped is None and not self._reason:
                self._reason = f"bwrap itself was killed by signal {-code}"
        return Outcome(
            started=self._started_at is not None,
            exit_code=code,
            stopped=self._stopped,
            stdout=bytes(self._output["stdout"]),
            stderr=bytes(self._output["stderr"]),
            wall_s=self._ended_at - self._started_at if self._started_at is not None else 0.0,
            reason=self._reason,
        )

    def _read(self, name: str) -> bool:
        """Takes what is there; false at the end of the stream."""
        data = self._pipes[name].read(_CHUNK)
        if data is None:
            return True
        buffer = self._output[name]
        buffer += data
        if name == "status":
            self._read_status()
        elif len(buffer) > self._limits.output_bytes:
            del buffer[self._limits.output_bytes :]
            self._stopped = self._stopped or ToolStatus.OUTPUT_LIMIT
        return bool(data)

    def _drain(self, name: str) -> None:
        """Reads to the end of the stream, to the limit, or to where nothing more is there."""
        while True:
            size = len(self._output[name])
            if not self._read(name) or len(self._output[name]) == size:
                return

    def _read_status(self) -> None:
        *lines, rest = bytes(self._output["status"]).split(b"\n")
        self._output["status"] = bytearray(rest)
        for line in lines:
            if line == b"ready":
                self._started_at = time.monotonic()
            elif (pid := json.loads(line).get("child-pid")) is not None:
                self._namespaced = True
                self._root_fd, self._ancestor = _open_namespace_root(pid), pid
                if self._root_fd is not None:
                    self._resources.callback(os.close, self._root_fd)

    def _stop_at_deadline(self) -> None:
        if self._started_at is None:
            self._reason = f"not ready after {_START_S:g} s"
        else:
            self._stopped = ToolStatus.TIMEOUT

    def _check_memory(self) -> None:
        if self._started_at is not None:
            killed = self._group is not None and self._group.was_exceeded()
            if killed or holds_more_than(self._ancestor, self._limits.memory_mb << 20):
                self._stopped = ToolStatus.MEMORY

    def _check_workspace(self) -> None:
        """Of the living too what they hold in files that are no longer there."""
        limit, is_over = self._limits.workspace_mb << 20, self._popen.returncode is not None
        if exceeds(self._workspace, max_bytes=limit, max_files=self._limits.workspace_files) or (
            not is_over and unlinked_bytes(self._ancestor, os.stat(self._workspace).st_dev) > limit
        ):
            self._stopped = ToolStatus.DISK_LIMIT

    def _kill(self) -> None:
        if self._root_fd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._root_fd, signal.SIGKILL)
        send = os.killpg if self._stop_signal == signal.SIGKILL else os.kill
        with contextlib.suppress(ProcessLookupError):
            send(self._popen.pid, self._stop_signal)  # not reaped yet, so the number is still its own

    def _await_death(self) -> None:
        """Of the process started, and of the namespace: its pid 1 is only gone when all others are."""
        for descriptor in (self._root_fd, self._exit_fd):
            if descriptor is not None and not _is_dead_within(descriptor, _DEATH_S):
                self._reason = "a killed process does not die"
                return
        self._popen.wait()
        if self._root_fd is not None:
            # Its parent may have gone first: then it is a child of whoever reaps orphans, in a container often ours.
            with contextlib.suppress(ChildProcessError):
                os.waitid(os.P_PIDFD, self._root_fd, os.WEXITED | os.WNOHANG)


def _open_namespace_root(pid: int) -> int | None:
    """A descriptor of the namespace's pid 1; None when it is dead already."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    # Its number may have passed to a stranger in the meantime: only a namespace's first process has an inner pid 1.
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        status = ""
    numbers = next((line.split()[1:] for line in status.splitlines() if line.startswith("NSpid:")), [])
    if len(numbers) > 1 and numbers[-1] == "1":
        return descriptor
    os.close(descriptor)
    return None


def _is_dead_within(descriptor: int, seconds: float) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(seconds * 1000))
