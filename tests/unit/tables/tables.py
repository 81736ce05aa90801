"""Small tables for tests: answers, submissions as text, and whole tables to build tasks of."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from lightning_mappa.tables.build import Table
from lightning_mappa.tables.metric_process import MetricProcess
from lightning_mappa.tables.scoring import Answers, Score, score
from lightning_mappa.tables.spec import TableSpec
from lightning_mappa.tasks.grading_process import CsvTable, read_csv


def answers(
    metric: str, *columns: Sequence[object], ids: Sequence[object] | None = None, train: Sequence[Sequence[str]] = ()
) -> Answers:
    """The truth of targets y0, y1, …; ids are 1, 2, … unless they are given."""
    names = tuple(f"y{place}" for place in range(len(columns)))
    spec = TableSpec(id_column="id", targets=names, metric=metric)
    keys = range(1, len(columns[0]) + 1) if ids is None else ids
    rows = tuple(tuple(map(str, row)) for row in zip(keys, *columns, strict=True))
    return Answers(spec, CsvTable(columns=("id", *names), rows=rows), tuple(map(tuple, train)))


def text_of(header: Sequence[str], rows: Sequence[Sequence[object]], end: str = "\n") -> str:
    return "".join(",".join(map(str, row)) + end for row in (header, *rows))


def score_text(text: str, truth: Answers, process: MetricProcess, folder: Path) -> Score:
    file = folder / "submission.csv"
    file.write_bytes(text.encode())
    return score(read_csv(file, truth.columns), truth, process)


def score_columns(truth: Answers, process: MetricProcess, folder: Path, *columns: Sequence[object]) -> Score:
    """Of predictions in the order of the truth."""
    rows = [(row[0], *cells) for row, cells in zip(truth.table.rows, zip(*columns, strict=True), strict=True)]
    return score_text(text_of(truth.table.columns, rows), truth, process, folder)


SPLITS = ("train", "selection", "report")


def rows(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as stream:
        return list(csv.DictReader(stream))


def table(name: str = "t", metric: str = "accuracy", n: int = 40, **changes) -> Table:
    label = [("a", "b", "c", "c")[row % 4] for row in range(n)]
    columns = {"x": [row / 3 for row in range(n)], "gap": [None if row % 5 else row for row in range(n)], "y": label}
    if metric != "accuracy":
        columns["y"] = list(range(n))
    fields = {
        "name": name,
        "about": "Rows.",
        "columns": columns,
        "spec": TableSpec(id_column="id", targets=("y",), metric=metric),
    }
    return Table(**{**fields, **changes})
