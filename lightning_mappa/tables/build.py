"""Turns any table into a task: files for the team, answers that it never sees, and the text that it reads.

The layout is that of DSBench, so that one loader reads both:

    ROOT/data_resplit/NAME/{train,test,sample_submission}.csv
    ROOT/answers/NAME/test_answer.csv
    ROOT/tasks.json
"""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lightning_mappa.errors import ConfigError
from lightning_mappa.tables.spec import METRICS, Form, TableSpec
from lightning_mappa.tasks.base import Split

Cell = str | int | float | bool | None
TEXTS = "tasks.json"

_METRIC_NAMES: Mapping[str, str] = {
    "accuracy": "accuracy, the share of right classes",
    "f1": "the F1 score",
    "f1_macro": "the F1 score, averaged over classes",
    "mcc": "the Matthews correlation coefficient",
    "quadratic_weighted_kappa": "the quadratic weighted kappa",
    "roc_auc": "the area under the ROC curve",
    "log_loss": "the logarithmic loss",
    "rmse": "the root mean squared error",
    "mcrmse": "the root mean squared error, averaged over the target columns",
    "mae": "the mean absolute error",
    "rmsle": "the root mean squared logarithmic error",
    "smape": "the symmetric mean absolute percentage error",
    "r2": "R squared",
}
_CELLS: Mapping[Form, str] = {
    Form.LABEL: "one of the classes, written as in train.csv",
    Form.SCORE: "a number that is larger where the second class is more likely, such as its probability",
    Form.PROBABILITY: "the probability of the second class",
    Form.NUMBER: "a number",
    Form.RANKED: "up to three classes, the likeliest first, separated by spaces",
    Form.TEXT: "a text",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A whole table and what a task on it asks for.

    Raises:
        ConfigError: columns of different lengths, or one of the spec that is not there.
    """

    name: str
    about: str
    """What the rows are, in a sentence or two."""
    columns: Mapping[str, Sequence[Cell]]
    """In order; None is a missing value. Without the id column, ids are counted from 1. Of a pandas frame it is
    `frame.to_dict("list")`."""
    spec: TableSpec
    meanings: Mapping[str, str] = field(default_factory=dict)
    """What a column holds."""

    def __post_init__(self) -> None:
        lengths = {len(cells) for cells in self.columns.values()}
        missing = [target for target in self.spec.targets if target not in self.columns]
        if len(lengths) != 1 or lengths == {0} or missing:
            raise ConfigError(
                f"table {self.name}: columns have {sorted(lengths)} rows and lack {missing}; every column needs as"
                " many rows as the others, at least one, and the targets are among them"
            )
        if any(_is_gap(cell) for target in self.spec.targets for cell in self.columns[target]):
            raise ConfigError(f"table {self.name}: a target is missing in some row; leave such rows out")

    @property
    def n_rows(self) -> int:
        return len(next(iter(self.columns.values())))


def build_task(
    root: Path, table: Table, *, seed: int, test_fraction: float = 0.25, split: Split | None = None, kind: str = ""
) -> None:
    """Writes one task below `root`, beside those that are there; the same files for the same seed.

    Rows are shuffled and ids given in the new order, so that neither says anything of the target. Test rows are
    drawn from every class in its proportion.

    Args:
        split: which one the task is for; None leaves that to the loader.
        kind: what kind of table it is, in a word, for figures by kind.

    Raises:
        ConfigError: a task of this name is there already, or one of the two parts would be empty.
    """
    spec = table.spec
    order = list(range(table.n_rows))
    random.Random(f"table/{seed}/{table.name}").shuffle(order)
    test = _test_rows(order, _strata(table), test_fraction)
    train = [row for row in order if row not in test]
    held_out = [row for row in order if row in test]
    if not train or not held_out:
        raise ConfigError(f"table {table.name}: {table.n_rows} rows leave none for training or for the test")
    ids: Sequence[Cell] = table.columns.get(spec.id_column) or _counted(train + held_out)
    features = [name for name in table.columns if name not in (spec.id_column, *spec.targets)]
    columns = {spec.id_column: ids, **{name: table.columns[name] for name in (*features, *spec.targets)}}

    public, hidden = root / "data_resplit" / table.name, root / "answers" / table.name
    try:
        public.mkdir(parents=True)
        hidden.mkdir(parents=True)
    except FileExistsError as error:
        raise ConfigError(f"table {table.name}: there is a task of that name in {root}") from error
    _write(public / "train.csv", list(columns), columns, train)
    _write(public / "test.csv", [spec.id_column, *features], columns, held_out)
    _write(hidden / "test_answer.csv", [spec.id_column, *spec.targets], columns, held_out)
    sample = sample_rows([_text(ids[row]) for row in held_out], spec, _text(columns[spec.targets[0]][train[0]]))
    write_csv(public / "sample_submission.csv", [spec.id_column, *spec.targets], sample)
    _add_text(root, table, features, split, kind)


def sample_rows(ids: Iterable[str], spec: TableSpec, label: str) -> list[list[str]]:
    """A submission that is valid and knows nothing: zeros, even chances, or the one `label` everywhere."""
    width = len(spec.targets)
    cell = {Form.NUMBER: "0", Form.SCORE: "0.5", Form.PROBABILITY: f"{1 / max(width, 2):.6g}"}.get(spec.form, label)
    return [[row_id, *([cell] * width)] for row_id in ids]


def write_csv(file: Path, header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    with file.open("w", encoding="utf-8", newline="") as stream:
        csv.writer(stream, lineterminator="\n").writerows([header, *rows])


def _strata(table: Table) -> list[str]:
    """Per row what it is drawn by."""
    if table.spec.kind != "classification":
        return [""] * table.n_rows
    return [_text(cell) for cell in table.columns[table.spec.targets[0]]]


def _test_rows(order: Sequence[int], strata: Sequence[str], fraction: float) -> set[int]:
    groups: dict[str, list[int]] = {}
    for row in order:
        groups.setdefault(strata[row], []).append(row)
    return {row for group in groups.values() for row in group[: round(fraction * len(group))]}


def _counted(rows: Sequence[int]) -> list[Cell]:
    ids: list[Cell] = [None] * len(rows)
    for number, row in enumerate(rows, start=1):
        ids[row] = number
    return ids


def _write(file: Path, names: Sequence[str], columns: Mapping[str, Sequence[Cell]], rows: Sequence[int]) -> None:
    write_csv(file, names, ([_text(columns[name][row]) for name in names] for row in rows))


def _text(cell: Cell) -> str:
    if _is_gap(cell):
        return ""
    return repr(float(cell)).removesuffix(".0") if isinstance(cell, float) else str(cell)


def _is_gap(cell: object) -> bool:
    """None, and what numpy and pandas have in its place; the word `nan` in a text is a word."""
    return not isinstance(cell, str) and str(cell) in ("None", "nan", "NaT", "<NA>")


def _add_text(root: Path, table: Table, features: Sequence[str], split: Split | None, kind: str) -> None:
    file = root / TEXTS
    texts = json.loads(file.read_text("utf-8")) if file.exists() else {}
    spec = table.spec
    texts[table.name] = {
        "cleaned_prompt": _prompt(table, features),
        "metric": spec.metric,
        "task_type": spec.kind,
        "target_column": list(spec.targets) if len(spec.targets) > 1 else spec.targets[0],
        "id_column": spec.id_column,
        **({"split": split} if split else {}),
        **({"kind": kind} if kind else {}),
    }
    file.write_text(json.dumps(texts, indent=1, ensure_ascii=False), "utf-8")


def _prompt(table: Table, features: Sequence[str]) -> str:
    spec = table.spec
    better = "higher" if METRICS[spec.metric].higher_is_better else "lower"
    lines = [f"- {name}: {table.meanings[name]}" for name in (*features, *spec.targets) if name in table.meanings]
    return "\n".join(
        [
            f"{table.about} Predict {' and '.join(spec.targets)} for every row of test.csv.",
            "",
            f"Scored by {_METRIC_NAMES.get(spec.metric, spec.metric)}; {better} is better.",
            f"Hand in submission.csv with the columns {','.join([spec.id_column, *spec.targets])}: every"
            f" {spec.id_column} of test.csv once, and in {' and '.join(spec.targets)} {_CELLS[spec.form]}.",
            "",
            f"train.csv has the target{'s' if len(spec.targets) > 1 else ''}, test.csv has not. Cells may be empty.",
            *lines,
        ]
    ).strip()
