"""What the strict reader takes and refuses, through the process that reads for grading."""

from __future__ import annotations

import bz2
import contextlib
import csv
import gzip
import io
import lzma
import os
import pickle  # noqa: TID251
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_mappa.errors import InfrastructureError
from lightning_mappa.tasks import grading_process
from lightning_mappa.tasks.csv_file import ColumnKind, CsvError, Fault, read_rows
from lightning_mappa.tasks.grading_process import CsvLimits, CsvRefused, CsvTable, read_csv

COLUMNS = {"id": ColumnKind.KEY, "y": ColumnKind.NUMBER}
LIMITS = {"max_columns": 50, "max_rows": 100, "row_chars": 1000, "cell_chars": 300}


def rows_of(data: bytes, columns=COLUMNS, **limits) -> list[tuple[str, ...]]:
    return list(read_rows(io.BytesIO(data), columns, **{**LIMITS, **limits}))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "submission.csv"


# -- what is read ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        b"id,y\na,1\nb,2.50\n",
        b"id,y\r\na,1\r\nb,2.50\r\n",
        b"id,y\na,1\nb,2.50",
        b"y,id\n1,a\n2.50,b\n",
        b'"id","y"\n"a","1"\n"b","2.50"\n',
    ],
    ids=["plain", "crlf", "no_last_newline", "other_order", "quoted"],
)
def test_the_same_table_in_every_spelling(data: bytes):
    assert rows_of(data) == [("a", "1"), ("b", "2.50")]


@pytest.mark.parametrize("number", ["0", "-1", "+1", "1.", ".5", "1e3", "1E-3", "007", "1.7976931348623157e308"])
def test_numbers_stand_as_they_were_written(number: str):
    assert rows_of(f"id,y\na,{number}\n".encode()) == [("a", number)]


def test_text_may_be_anything_but_numbers_are_numbers():
    table = 'id,label\n"a,""b""\n",=cmd()\nnan,\nTrue,é\n'
    assert rows_of(table.encode(), {"id": ColumnKind.KEY, "label": ColumnKind.TEXT}) == [
        ('a,"b"\n', "=cmd()"),
        ("nan", ""),
        ("True", "é"),
    ]


PLAIN = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)


@given(st.lists(st.tuples(PLAIN, PLAIN), min_size=1, max_size=8))
def test_what_the_csv_module_writes_comes_back(rows: list[tuple[str, str]]):
    text = io.StringIO(newline="")
    csv.writer(text, quoting=csv.QUOTE_ALL).writerows([("a", "b"), *rows])
    columns = {"a": ColumnKind.TEXT, "b": ColumnKind.TEXT}
    assert rows_of(text.getvalue().encode(), columns) == rows


# -- what is refused ------------------------------------------------------------------------------------------

FAULTS = {
    Fault.EMPTY: [b"", b"\n", b"\r\nid,y\n"],
    Fault.BYTE_ORDER_MARK: [b"\xef\xbb\xbfid,y\na,1\n", "\ufeffid,y\na,1\n".encode("utf-16-le")],
    Fault.NUL: [b"id,y\na,1\0\n", "id,y\na,1\n".encode("utf-16-le"), b"\0" * 50],
    Fault.NOT_UTF8: [b"id,y\n\xff,1\n", pickle.dumps([1, 2, 3], protocol=0) + b"\x80", b"\x80\x02"],
    Fault.QUOTING: [b'id,y\n"a,1\n', b'id,y\n"a"b,1\n'],
    Fault.SEPARATOR: [b"id;y\na;1\n", b"id\ty\na\t1\n", b"id|y\na|1\n"],
    Fault.DUPLICATE_COLUMN: [b"id,y,y\na,1,2\n"],
    Fault.MISSING_COLUMN: [b"id,Y\na,1\n", b"id, y\na, 1\n", b"id\na\n", b"a,1\nb,2\n", b"{}\n"],
    Fault.EXTRA_COLUMN: [b"id,y,z\na,1,2\n", b",id,y\n0,a,1\n"],
    Fault.NO_ROWS: [b"id,y\n", b"id,y"],
    Fault.ROW_LENGTH: [b"id,y\na\n", b"id,y\na,1,2\n", b"id,y\n\na,1\n", b"id,y\na,1\n\n", b"id,y\na;1\n"],
    Fault.EMPTY_CELL: [b"id,y\n,1\n", b"id,y\na,\n"],
    Fault.DUPLICATE_KEY: [b"id,y\na,1\nb,1\na,1\n"],
    Fault.NOT_FINITE: [
        f"id,y\na,{value}\n".encode()
        for value in ("nan", "NaN", "-inf", "Infinity", "1e999", "-1e999", "9" * 200 + "e200")
    ],
    Fault.BOOLEAN: [b"id,y\na,True\n", b"id,y\na,false\n"],
    Fault.NOT_A_NUMBER: [
        f'id,y\na,"{value}"\n'.encode()
        for value in ("=1+1", "1,5", "1_000", "0x1F", " 1", "1 ", "1%", "-", "e5", "\uff11", "None", "1\n", "[1]")
    ],
    Fault.TOO_MANY_COLUMNS: [b",".join(b"c%d" % n for n in range(51)) + b"\na\n", b"," * 5000, b'"\n",' * 100],
    Fault.TOO_MANY_ROWS: [b"id,y\n" + b"".join(b"%d,1\n" % n for n in range(101))],
    Fault.CELL_TOO_LARGE: [b"id,y\n" + b"a" * 301 + b",1\n", b'id,y\n"' + b"a\n" * 200 + b'",1\n'],
    Fault.ROW_TOO_LARGE: [b'id,y\n"' + b"a" * 5000 + b'",1\n', b"a" * 5000, b"id,y\n" + b'"\n",' * 600],
}


@pytest.mark.parametrize(
    ("fault", "data"),
    [pytest.param(fault, data, id=f"{fault}-{n}") for fault, cases in FAULTS.items() for n, data in enumerate(cases)],
)
def test_a_fault_has_its_type(fault: Fault, data: bytes):
    with pytest.raises(CsvError) as refused:
        rows_of(data)
    assert refused.value.fault == fault, refused.value
    assert refused.value.detail.isprintable()
    assert refused.value.detail.isascii()
    assert len(refused.value.detail) < 250


def test_compressed_files_are_refused_unopened():
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("submission.csv", b"id,y\n" * 1_000_000)
    for data in (archive.getvalue(), gzip.compress(b"id,y\n"), bz2.compress(b"id,y\n"), lzma.compress(b"id,y\n")):
        with pytest.raises(CsvError, match="compressed: the file is"):
            rows_of(data)


@given(st.binary(max_size=300))
def test_any_bytes_are_a_table_or_a_fault(data: bytes):
    for table in (data, b"id,y\n" + data):
        with contextlib.suppress(CsvError):
            assert all(len(row) == 2 for row in rows_of(table))


# -- the process ----------------------------------------------------------------------------------------------


def test_a_table_comes_out_of_the_process(file: Path):
    file.write_text('y,id\n1.5,"ä\n,"\n2,b\n')
    assert read_csv(file, COLUMNS) == CsvTable(columns=("id", "y"), rows=(("ä\n,", "1.5"), ("b", "2")))


def test_a_fault_after_rows_leaves_no_rows(file: Path):
    file.write_text("id,y\na,1\nb,nan\n")
    assert read_csv(file, COLUMNS) == CsvRefused(
        fault=Fault.NOT_FINITE, detail="line 3, column 'y': 'nan' is not finite"
    )


def test_what_is_no_regular_file_is_missing(file: Path, tmp_path: Path):
    def fault() -> Fault:
        refused = read_csv(file, COLUMNS)
        assert isinstance(refused, CsvRefused)
        return refused.fault

    assert fault() == Fault.MISSING
    (tmp_path / "other.csv").write_text("id,y\na,1\n")
    file.symlink_to("other.csv")
    assert fault() == Fault.MISSING
    file.unlink()
    os.mkfifo(file)
    assert fault() == Fault.MISSING
    file.unlink()
    file.mkdir()
    assert fault() == Fault.MISSING


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (b"c," * 10_000_000, Fault.TOO_MANY_COLUMNS),
        (b'id,y\n"' + b"a" * 30_000_000 + b'",1\n', Fault.ROW_TOO_LARGE),
        (b'id,y\n"' + b"aaaaaaaaa\n" * 3_000_000 + b'",1\n', Fault.CELL_TOO_LARGE),
    ],
    ids=["ten_million_columns", "cell_of_30_MB", "cell_of_30_MB_in_lines"],
)
def test_bombs_cost_little(file: Path, data: bytes, fault: Fault):
    file.write_bytes(data)
    begin = time.monotonic()
    refused = read_csv(file, COLUMNS, CsvLimits(memory_mb=64))
    assert isinstance(refused, CsvRefused)
    assert refused.fault == fault
    assert time.monotonic() - begin < 5


def test_a_sparse_tebibyte_is_not_read(file: Path):
    with file.open("wb") as sparse:
        sparse.truncate(1 << 40)
    assert read_csv(file, COLUMNS) == CsvRefused(
        fault=Fault.TOO_LARGE, detail="1099511627776 bytes, more than 33554432"
    )


def test_memory_and_time_of_the_process_are_limited(file: Path):
    file.write_text("id,y\n" + "".join(f"{n:0300},1\n" for n in range(100_000)))
    refused = read_csv(file, COLUMNS, CsvLimits(memory_mb=48))
    assert isinstance(refused, CsvRefused)
    assert refused.fault == Fault.MEMORY
    refused = read_csv(file, COLUMNS, CsvLimits(wall_s=0.02))
    assert isinstance(refused, CsvRefused)
    assert refused.fault == Fault.TIMEOUT


def test_modules_beside_the_file_are_not_imported(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    canary = tmp_path / "canary"
    for name in ("csv.py", "json.py", "io.py", "sitecustomize.py", "usercustomize.py"):
        (tmp_path / name).write_text(f"open({str(canary)!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PYTHONSTARTUP", str(tmp_path / "csv.py"))
    file.write_text("id,y\na,1\n")
    assert isinstance(read_csv(file, COLUMNS), CsvTable)
    assert not canary.exists()


def test_the_process_can_do_nothing_but_read(file: Path, monkeypatch: pytest.MonkeyPatch):
    """The same confinement around a program that tries."""
    file.write_text("id,y\na,1\n")
    attempts = """
    import os, json
    def outcome(attempt):
        try: return str(attempt())
        except OSError as error: return type(error).__name__
    given = json.loads(arguments)
    _confine(**given["confine"])
    print(json.dumps([outcome(attempt) for attempt in (
        os.getuid, os.getgroups, os.getcwd, lambda: ",".join(sorted(os.environ)), lambda: open("/etc/passwd"), os.fork,
        lambda: "/tmp" in sys.path,
    )]))
    print("{}")
"""
    text, _, _ = grading_process._READER.partition("    given = json.loads(arguments)")
    monkeypatch.setattr(grading_process, "_READER", f"{text}{attempts}\n_main(sys.argv[1])\n")
    table = read_csv(file, COLUMNS)
    assert isinstance(table, CsvTable)
    uid, groups, folder, names, opened, forked, on_path = table.rows[0]
    assert (folder, opened, on_path) == ("/", "OSError", "False")
    assert names in ("", "LC_CTYPE")  # of Python's own making
    assert int(uid) != 0
    if os.geteuid() == 0:
        assert (int(uid), groups) == (grading_process.READER_UID, "[]")
        assert forked == "BlockingIOError"


def test_a_reader_that_fails_is_not_the_files_fault(file: Path, monkeypatch: pytest.MonkeyPatch):
    file.write_text("id,y\na,1\n")
    monkeypatch.setattr(grading_process, "_READER", "raise SystemExit('broken')")
    with pytest.raises(InfrastructureError, match="broken"):
        read_csv(file, COLUMNS)
    monkeypatch.setattr(grading_process, "_READER", "print('[1]')")
    with pytest.raises(InfrastructureError, match="failed"):
        read_csv(file, COLUMNS)


def test_the_reader_needs_the_standard_library_only():
    code = "import sys; before = set(sys.modules); exec(sys.stdin.read()); print(*set(sys.modules) - before)"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code.replace("exec(", "__name__ = 'reader'; exec(")],
        input=grading_process._READER,
        capture_output=True,
        text=True,
        check=True,
    )
    assert {name.partition(".")[0] for name in done.stdout.split()} <= set(sys.stdlib_module_names)
