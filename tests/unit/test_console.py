"""A table that is piped is whole; on a terminal it has the terminal's width."""

from __future__ import annotations

import pytest

from lightning_mappa.console import PIPED_WIDTH, table_console


@pytest.mark.parametrize(("columns", "width"), [(None, PIPED_WIDTH), ("90", 90)])
def test_a_pipe_is_wide_unless_the_user_says_how_wide(monkeypatch, columns, width):
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    assert table_console().width == width
