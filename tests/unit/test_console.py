"""A table that is piped is whole; on a terminal it has the terminal's width."""

from __future__ import annotations

import io

import pytest
from rich.table import Table

from lightning_mappa.console import PipedConsole, table_console


@pytest.fixture(autouse=True)
def _piped(monkeypatch, capsys):
    """Under `pytest -s` too."""
    monkeypatch.delenv("COLUMNS", raising=False)


def test_a_piped_table_is_whole(capsys):
    cells = ["a" * 150, "b" * 150]
    table = Table("first", "second")
    table.add_row(*cells)
    table_console().print(table)
    shown = capsys.readouterr().out
    assert all(cell in shown for cell in cells)


@pytest.mark.parametrize(("columns", "width"), [("90", 90), ("", 1000), ("0", 1000)])
def test_columns_say_how_wide(monkeypatch, columns, width):
    monkeypatch.setenv("COLUMNS", columns)
    assert table_console().width == width


class Gone(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_a_reader_that_has_gone_does_not_end_the_program():
    with pytest.raises(BrokenPipeError, match="nobody reads"):
        PipedConsole(file=Gone()).print("x")
