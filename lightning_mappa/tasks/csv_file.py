"""Reads a CSV file that a model's program wrote, and guesses nothing.

The text of this module also runs on its own, without this package, in the process of `grading_process`: it needs
the standard library only. Comma, double quotes, UTF-8, a header with exactly the named columns in any order, and in
every row as many cells as the header has. What else a file may be is refused with a `Fault`.
"""

import csv
import io
import json
import math
import os
import re
import resource
import sys
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import BinaryIO


class Fault(StrEnum):
    """Why a file was refused. Every one is the file's, not ours."""

    MISSING = "missing"
    EMPTY = "empty"
    TOO_LARGE = "too_large"
    COMPRESSED = "compressed"
    BYTE_ORDER_MARK = "byte_order_mark"
    NUL = "nul"
    NOT_UTF8 = "not_utf8"
    QUOTING = "quoting"
    SEPARATOR = "separator"
    TOO_MANY_COLUMNS = "too_many_columns"
    DUPLICATE_COLUMN = "duplicate_column"
    MISSING_COLUMN = "missing_column"
    EXTRA_COLUMN = "extra_column"
    NO_ROWS = "no_rows"
    TOO_MANY_ROWS = "too_many_rows"
    ROW_TOO_LARGE = "row_too_large"
    ROW_LENGTH = "row_length"
    CELL_TOO_LARGE = "cell_too_large"
    EMPTY_CELL = "empty_cell"
    DUPLICATE_KEY = "duplicate_key"
    NOT_FINITE = "not_finite"
    BOOLEAN = "boolean"
    NOT_A_NUMBER = "not_a_number"
    MEMORY = "memory"
    TIMEOUT = "timeout"


class ColumnKind(StrEnum):
    TEXT = "text"
    """Any text."""
    KEY = "key"
    """Not empty, and in no two rows the same."""
    NUMBER = "number"
    """Decimal digits, with sign, point or exponent, and finite as a float."""


class CsvError(ValueError):
    """The file is refused; `detail` is one printable ASCII line."""

    def __init__(self, fault: Fault, detail: str) -> None:
        super().__init__(f"{fault.value}: {detail}")
        self.fault = fault
        self.detail = detail


_COMPRESSED = {
    b"PK\x03\x04": "zip",
    b"PK\x05\x06": "zip",
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\x00": "xz",
    b"\x28\xb5\x2f\xfd": "zstandard",
    b"7z\xbc\xaf": "7z",
}
_MARKS = (b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")
_OTHER_SEPARATORS = (";", "\t", "|")
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[+-]?(?:nan|inf|infinity)", re.IGNORECASE)


def read_rows(
    stream: BinaryIO,
    columns: Mapping[str, ColumnKind],
    *,
    max_columns: int,
    max_rows: int,
    row_chars: int,
    cell_chars: int,
) -> Iterator[tuple[str, ...]]:
    """The rows in the file's order, each with the cells of `columns` in their order, as they stand in the file.

    Memory is bounded by one row and the keys. Sets the `csv` module's limit for this process.

    Raises:
        CsvError: at the first fault, which may come after rows.
    """
    csv.field_size_limit(cell_chars)
    _refuse_other_formats(stream)
    lines = _Lines(stream, row_chars=row_chars, max_columns=max_columns)
    reader = csv.reader(lines, strict=True)
    header = _next_row(reader, lines)
    if not header:
        raise CsvError(Fault.EMPTY, "the first line has no column names")
    places = _places(header, list(columns), max_columns)
    keys: dict[str, set[str]] = {name: set() for name, kind in columns.items() if kind is ColumnKind.KEY}
    count = 0
    while (row := _next_row(reader, lines)) is not None:
        where = f"line {reader.line_num}"
        count += 1
        if count > max_rows:
            raise CsvError(Fault.TOO_MANY_ROWS, f"{where}: more than {max_rows} rows")
        if len(row) != len(header):
            raise CsvError(Fault.ROW_LENGTH, f"{where}: {len(row)} cells under {len(header)} column names")
        cells = tuple(row[place] for place in places)
        for (name, kind), cell in zip(columns.items(), cells, strict=True):
            _check_cell(cell, kind, keys.get(name), f"{where}, column {_shown(name)}")
        yield cells
    if count == 0:
        raise CsvError(Fault.NO_ROWS, "there is no row under the column names")


class _Lines:
    """Decoded lines for `csv.reader`, which may take several for one row: never more than `row_chars` of them."""

    def __init__(self, stream: BinaryIO, *, row_chars: int, max_columns: int) -> None:
        self._text = io.TextIOWrapper(stream, encoding="utf-8", newline="")
        self._row_chars = row_chars
        self._max_columns = max_columns
        self._number = 0
        self.row_begins()

    def row_begins(self) -> None:
        self._chars = self._commas = 0

    def __iter__(self) -> "_Lines":
        return self

    def __next__(self) -> str:
        self._number += 1
        line = self._text.readline(self._row_chars + 1)
        self._chars += len(line)
        self._commas += line.count(",")
        if "\0" in line:
            raise CsvError(Fault.NUL, f"line {self._number}: a NUL character")
        if self._chars > self._row_chars:
            if self._number == 1 and self._commas >= self._max_columns:
                raise CsvError(Fault.TOO_MANY_COLUMNS, f"more than {self._max_columns}")
            raise CsvError(Fault.ROW_TOO_LARGE, f"line {self._number}: a row of more than {self._row_chars} characters")
        if not line:
            raise StopIteration
        return line


def _next_row(reader: "Iterator[list[str]]", lines: _Lines) -> list[str] | None:
    lines.row_begins()
    try:
        return next(reader, None)
    except UnicodeDecodeError as error:
        raise CsvError(Fault.NOT_UTF8, f"byte {error.object[error.start]:#04x} is no UTF-8") from None
    except csv.Error as error:
        fault = Fault.CELL_TOO_LARGE if "field limit" in str(error) else Fault.QUOTING
        raise CsvError(fault, f"after line {getattr(reader, 'line_num', 0)}: {error}") from None


def _refuse_other_formats(stream: BinaryIO) -> None:
    start = stream.read(8)
    stream.seek(0)
    if not start:
        raise CsvError(Fault.EMPTY, "the file has no bytes")
    for magic, name in _COMPRESSED.items():
        if start.startswith(magic):
            raise CsvError(Fault.COMPRESSED, f"the file is {name} data")
    if start.startswith(_MARKS):
        raise CsvError(Fault.BYTE_ORDER_MARK, "the file starts with a byte order mark; write plain UTF-8")


def _places(header: Sequence[str], wanted: Sequence[str], max_columns: int) -> list[int]:
    """Where in a row the wanted columns are."""
    if len(header) > max_columns:
        raise CsvError(Fault.TOO_MANY_COLUMNS, f"{len(header)}, more than {max_columns}")
    for name in header:
        if header.count(name) > 1:
            raise CsvError(Fault.DUPLICATE_COLUMN, f"column {_shown(name)} is there twice")
    missing = [name for name in wanted if name not in header]
    if missing and len(header) == 1 < len(wanted):
        for separator in _OTHER_SEPARATORS:
            if set(wanted) <= set(header[0].split(separator)):
                raise CsvError(Fault.SEPARATOR, f"cells are separated by {separator!r}; allowed is a comma")
    if missing:
        raise CsvError(Fault.MISSING_COLUMN, f"no column {_shown(missing[0])}; wanted are {_shown(','.join(wanted))}")
    for name in header:
        if name not in wanted:
            raise CsvError(Fault.EXTRA_COLUMN, f"column {_shown(name)} is not wanted, only {_shown(','.join(wanted))}")
    return [header.index(name) for name in wanted]


def _check_cell(cell: str, kind: ColumnKind, keys: set[str] | None, where: str) -> None:
    if kind is not ColumnKind.TEXT and not cell:
        raise CsvError(Fault.EMPTY_CELL, f"{where}: empty")
    if keys is not None:
        if cell in keys:
            raise CsvError(Fault.DUPLICATE_KEY, f"{where}: {_shown(cell)} a second time")
        keys.add(cell)
    if kind is ColumnKind.NUMBER:
        if _NOT_FINITE.fullmatch(cell):
            raise CsvError(Fault.NOT_FINITE, f"{where}: {_shown(cell)} is not finite")
        if cell.lower() in ("true", "false"):
            raise CsvError(Fault.BOOLEAN, f"{where}: {_shown(cell)} is a boolean")
        if not _NUMBER.fullmatch(cell):
            raise CsvError(Fault.NOT_A_NUMBER, f"{where}: {_shown(cell)} is not a number")
        if not math.isfinite(float(cell)):
            raise CsvError(Fault.NOT_FINITE, f"{where}: {_shown(cell)} is too large for a float")


def _shown(text: str) -> str:
    shown = ascii(text)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."


def _confine(memory_bytes: int, cpu_s: int, uid: int) -> None:
    """No more memory, time, files or processes than reading takes; no longer root where it was."""
    limits = {
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_CPU: cpu_s,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: 3,
        resource.RLIMIT_NPROC: 0,
    }
    for name, value in limits.items():
        resource.setrlimit(name, (value, value))
    if uid >= 0:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)


def _main(arguments: str) -> None:
    """Writes one JSON array per row, then one object: `{}` or the fault."""
    given = json.loads(arguments)
    _confine(**given["confine"])
    columns = {name: ColumnKind(kind) for name, kind in given["columns"]}
    end: dict[str, str] = {}
    try:
        for row in read_rows(sys.stdin.buffer, columns, **given["limits"]):
            print(json.dumps(row))
    except CsvError as error:
        end = {"fault": error.fault.value, "detail": error.detail}
    except MemoryError:
        end = {"fault": Fault.MEMORY.value, "detail": "reading the file takes too much memory"}
    print(json.dumps(end), flush=True)


if __name__ == "__main__":
    _main(sys.argv[1])
