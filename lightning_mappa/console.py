"""Where tables and progress are printed."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from rich.console import Console

PIPED_WIDTH = 1000
"""Columns: more than a table needs, which is as wide as what is in it."""


class PipedConsole(Console):
    """Leaves it to the caller what a reader that has gone means; rich would end the program."""

    def on_broken_pipe(self) -> NoReturn:
        self.quiet = True
        raise BrokenPipeError("nobody reads the output any more")


def table_console() -> Console:
    """As wide as the terminal, or as `COLUMNS` says; for a file or another program as wide as a table has to be."""
    columns = os.environ.get("COLUMNS", "")
    known = sys.stdout.isatty() or (columns.isdigit() and int(columns) > 0)
    return PipedConsole(width=None if known else PIPED_WIDTH, soft_wrap=True, highlight=False)
