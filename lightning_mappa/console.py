"""Where tables are printed."""

from __future__ import annotations

import os
import sys

from rich.console import Console

PIPED_WIDTH = 160
"""Columns. Piped into a file, a table is as wide as it has to be."""


def table_console() -> Console:
    """As wide as the terminal, or as `COLUMNS` says; for a file or another program so wide that nothing is cut."""
    known = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(width=None if known else PIPED_WIDTH, soft_wrap=True, highlight=False)
