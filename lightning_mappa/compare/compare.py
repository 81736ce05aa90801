"""`mappa compare RUN…`: runs grouped by config, paired by seed and problem."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from lightning_mappa.compare.conditions import compare_runs
from lightning_mappa.compare.plot import draw_plot
from lightning_mappa.compare.runs import find_runs, load_runs
from lightning_mappa.compare.tables import as_data, show
from lightning_mappa.console import table_console
from lightning_mappa.errors import ConfigError, ExitCode


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; allowed: mappa compare RUN ... [--json] [--plot FILE]")


def compare(arguments: Sequence[str]) -> ExitCode:
    """`arguments` are run folders, or folders of runs such as a sweep's; `--json` prints data instead of tables, and
    `--plot FILE` draws as well.

    Raises:
        ConfigError: nothing to compare, a run without figures, or two runs of one config and seed.
    """
    parser = _Parser(prog="mappa compare", description=__doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", type=Path)
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--plot", metavar="FILE", type=Path, help="draw into a .png, .svg or .pdf file")
    parsed = parser.parse_args(list(arguments))
    comparison = compare_runs(load_runs(find_runs(parsed.runs)))
    if parsed.json:
        print(json.dumps(as_data(comparison), indent=2))
    else:
        show(comparison, table_console())
    if parsed.plot is not None:
        draw_plot(comparison, parsed.plot)
    return ExitCode.DONE
