"""The one way in which a file that programs wrote is read for grading: as text, by a process of its own.

That process sees an open file and an empty environment. It has a limit of memory and time, may neither open nor
write a file nor start a process, is not root, and has no folder of a workspace on its path.
"""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lightning_mappa.errors import InfrastructureError
from lightning_mappa.tasks import csv_file
from lightning_mappa.tasks.csv_file import ColumnKind, Fault

READER_UID = 60599
"""For root: beside those of the sandbox, owned by no account."""
_READER = Path(csv_file.__file__).read_text(encoding="utf-8")


@dataclass(frozen=True, slots=True, kw_only=True)
class CsvLimits:
    """What a file may be and its reader may use. All positive."""

    file_bytes: int = 32 << 20
    columns: int = 1000
    rows: int = 1_000_000
    row_chars: int = 1 << 20
    cell_chars: int = 1 << 16
    memory_mb: int = 512
    """Address space of the reading process."""
    wall_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CsvTable:
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    """In the file's order, cells in the order of `columns`, as they stand in the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CsvRefused:
    fault: Fault
    detail: str
    """One printable line."""


def read_csv(file: Path, columns: Mapping[str, ColumnKind], limits: CsvLimits | None = None) -> CsvTable | CsvRefused:
    """Reads `file`, a regular file with exactly these columns in any order.

    Raises:
        InfrastructureError: the reading process failed in a way that is not the file's.
    """
    limits = limits or CsvLimits()
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        return CsvRefused(fault=Fault.MISSING, detail=f"the file cannot be opened ({error.strerror})")
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            return CsvRefused(fault=Fault.MISSING, detail="it is not a regular file")
        if found.st_size > limits.file_bytes:
            detail = f"{found.st_size} bytes, more than {limits.file_bytes}"
            return CsvRefused(fault=Fault.TOO_LARGE, detail=detail)
        return _read(descriptor, columns, limits)
    finally:
        os.close(descriptor)


def _read(descriptor: int, columns: Mapping[str, ColumnKind], limits: CsvLimits) -> CsvTable | CsvRefused:
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _READER, json.dumps(_arguments(columns, limits))],
            env={},
            cwd="/",
            stdin=descriptor,
            capture_output=True,
            start_new_session=True,
            timeout=limits.wall_s,
        )
    except subprocess.TimeoutExpired:
        return CsvRefused(fault=Fault.TIMEOUT, detail=f"reading it takes more than {limits.wall_s:g} s")
    except OSError as error:
        raise InfrastructureError(f"the process that reads CSV files cannot be started: {error}") from error
    *rows, end = [json.loads(line) for line in done.stdout.splitlines()] or [None]
    if done.returncode != 0 or not isinstance(end, dict):
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise InfrastructureError(f"the process that reads CSV files failed: {last[0]}")
    if end:
        return CsvRefused(fault=Fault(end["fault"]), detail=end["detail"])
    return CsvTable(columns=tuple(columns), rows=tuple(tuple(row) for row in rows))


def _arguments(columns: Mapping[str, ColumnKind], limits: CsvLimits) -> dict[str, object]:
    return {
        "columns": list(columns.items()),
        "limits": {
            "max_columns": limits.columns,
            "max_rows": limits.rows,
            "row_chars": limits.row_chars,
            "cell_chars": limits.cell_chars,
        },
        "confine": {
            "memory_bytes": limits.memory_mb << 20,
            "cpu_s": int(limits.wall_s) + 1,
            "uid": READER_UID if os.geteuid() == 0 else -1,
        },
    }
