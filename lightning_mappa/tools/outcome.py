"""How a program ended, as the operating system saw it, and what that means as a `ToolResult`."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass

from lightning_mappa.tools.sandbox import Limits
from lightning_mappa.types import ToolResult, ToolStatus

# The last words of a program that ran into a limit: an exception at the start of a line, of whatever module.
_MEMORY = re.compile(r"^(?:[\w.]*MemoryError\b|.*std::bad_alloc)", re.MULTILINE)
_DISK = re.compile(r"^OSError: \[Errno (?:27|28|122)\]", re.MULTILINE)
_PROCESSES = re.compile(
    r"^(?:BlockingIOError: \[Errno 11\]|RuntimeError: can't (?:start new thread|allocate lock))", re.MULTILINE
)
_LAST_WORDS = 4000
_TERMINAL = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-_])")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What was seen of one start."""

    started: bool
    """The launcher said `ready`: all that follows is the program's doing."""
    exit_code: int | None = None
    """Negative for a signal, as in `subprocess`; None where it never started."""
    stopped: ToolStatus | None = None
    """The limit for which it was killed from outside."""
    stdout: bytes = b""
    stderr: bytes = b""
    wall_s: float = 0.0
    reason: str = ""
    """Why it did not start, or was not brought to an end."""


def as_result(outcome: Outcome, limits: Limits, shown_chars: int, tier: str) -> ToolResult:
    status, reason = classify(outcome, limits)
    return ToolResult(
        status=status,
        stdout=head_and_tail(clean(outcome.stdout), shown_chars),
        stderr=head_and_tail(clean(outcome.stderr), shown_chars),
        exit_code=outcome.exit_code,
        wall_s=outcome.wall_s,
        reason=reason,
        tier=tier,
    )


def classify(outcome: Outcome, limits: Limits) -> tuple[ToolStatus, str]:
    """The status, and one line for agent and coach; empty when the program simply ended.

    Exit codes of the program's own that exceed 128 read as signals, as in a shell.
    """
    code = outcome.exit_code
    if not outcome.started or outcome.reason or code is None:
        last = clean(outcome.stderr).strip().splitlines()[-1:] or ["it did not start"]
        return ToolStatus.SANDBOX_ERROR, f"the sandbox failed: {outcome.reason or last[0]}"
    if outcome.stopped is not None:
        return outcome.stopped, _limit_reached(outcome.stopped, limits)
    if code == 0:
        return ToolStatus.OK, ""
    if code == -signal.SIGXCPU:
        return ToolStatus.TIMEOUT, f"stopped after {limits.cpu_s} s of processor time"
    if code == -signal.SIGXFSZ:
        return ToolStatus.DISK_LIMIT, _limit_reached(ToolStatus.DISK_LIMIT, limits)
    last_words = outcome.stderr[-_LAST_WORDS:].decode(errors="replace")
    patterns = {
        ToolStatus.MEMORY: _MEMORY,
        ToolStatus.DISK_LIMIT: _DISK,
        ToolStatus.PROCESS_LIMIT: _PROCESSES,
    }
    for status, pattern in patterns.items():
        if pattern.search(last_words):
            return status, _limit_reached(status, limits)
    if code < 0:
        return ToolStatus.SIGNAL, f"killed by signal {-code} ({_signal_name(-code)})"
    return ToolStatus.NONZERO, f"exit code {code}"


def _limit_reached(status: ToolStatus, limits: Limits) -> str:
    return {
        ToolStatus.TIMEOUT: f"stopped after {limits.wall_s:g} s",
        ToolStatus.OUTPUT_LIMIT: f"stopped after {limits.output_bytes} bytes of output",
        ToolStatus.MEMORY: f"more than {limits.memory_mb} MB of memory",
        ToolStatus.DISK_LIMIT: f"more than {limits.workspace_mb} MB or {limits.workspace_files} files written",
        ToolStatus.PROCESS_LIMIT: f"more than {limits.processes} processes and threads",
    }[status]


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "real-time"


def clean(output: bytes) -> str:
    """Text that is safe in a prompt, a log and a terminal: bad UTF-8 replaced, and neither terminal sequences nor
    control characters but newline and tab."""
    return _CONTROL.sub("", _TERMINAL.sub("", output.decode("utf-8", errors="replace")))


def head_and_tail(text: str, limit: int) -> str:
    """`text`, or when longer than `limit` characters its two ends, around a line that counts what is left out.

    The ends have `limit` characters together; the line comes on top.
    """
    if len(text) <= limit:
        return text
    tail = limit // 2
    head = limit - tail
    return f"{text[:head]}\n[… {len(text) - limit} characters left out …]\n{text[len(text) - tail :]}"
