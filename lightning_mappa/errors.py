"""One root, one class per boundary.

Messages say what was given, what is allowed, and the key to set. A failed rollout, tool run or coach call
is *not* an exception: it is an `Episode`, `ToolResult` or `Verdict` with a status and a reason.
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """What `mappa` returns to the shell."""

    DONE = 0
    BUG = 1
    CONFIG = 2
    PREEMPTED = 3
    COACH = 4
    NUMERIC = 5
    INFRASTRUCTURE = 6


class MappaError(Exception):
    """Root of every error this package raises on purpose."""

    exit_code: ExitCode = ExitCode.BUG


class ConfigError(MappaError, ValueError):
    """The user asked for something that cannot be: a key, a value, a file."""

    exit_code = ExitCode.CONFIG


class NotAvailableError(ConfigError):
    """A documented option that this version does not build."""


class CoachError(MappaError, RuntimeError):
    """The coach's budget is spent or too many verdicts are missing; the run is resumable."""

    exit_code = ExitCode.COACH


class NumericError(MappaError, ArithmeticError):
    """Non-finite losses or gradients, several steps in a row."""

    exit_code = ExitCode.NUMERIC


class DataError(MappaError, ValueError):
    """Recorded data (transcripts, checkpoints, weights) is damaged or belongs to another run."""

    exit_code = ExitCode.NUMERIC


class InfrastructureError(MappaError, RuntimeError):
    """An engine, a rank, the sandbox or the disk failed for good."""

    exit_code = ExitCode.INFRASTRUCTURE


class EngineLost(InfrastructureError):
    """An engine is gone for good: no episode can go on, unlike one that failed by itself."""


class RankLost(InfrastructureError):
    """A process that trained an agent died or hangs; the run can go on from its last joint checkpoint."""


class Preempted(MappaError):
    """A signal stopped the run between two steps; its last joint checkpoint goes on with `resume`."""

    exit_code = ExitCode.PREEMPTED


class RunEnded(MappaError):
    """The run is over for this agent: no further experience will come."""

    exit_code = ExitCode.DONE
