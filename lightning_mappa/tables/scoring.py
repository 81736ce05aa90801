"""From a submission as read and the hidden answers to metrics, or to the one reason why it has none.

Rows are joined on the id, one to one. Nothing is dropped, filled, rounded or clipped to make a submission fit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any

from lightning_mappa.errors import ConfigError
from lightning_mappa.tables.metric_process import MetricProcess
from lightning_mappa.tables.spec import METRICS, Form, Spelling, TableSpec, plain_number
from lightning_mappa.tasks.csv_file import ColumnKind, Fault
from lightning_mappa.tasks.grading_process import CsvRefused, CsvTable

MAX_SIZE = 1e100
"""Of a predicted number: squares of larger ones are no floats."""


class SubmissionFault(StrEnum):
    """Why a well-formed table is refused; `csv_file.Fault` has the reasons for a file."""

    MISSING_ID = "missing_id"
    EXTRA_ID = "extra_id"
    UNKNOWN_LABEL = "unknown_label"
    NOT_A_PROBABILITY = "not_a_probability"
    OUT_OF_RANGE = "out_of_range"


class Refused(ValueError):
    """`fault` is a name of `Fault` or `SubmissionFault`, the text one line that says what was found."""

    def __init__(self, fault: Fault | SubmissionFault, detail: str) -> None:
        super().__init__(detail)
        self.fault = fault


@dataclass(frozen=True)
class Answers:
    """The truth of one task, from `table`, whose columns are the id and the targets of `spec` in that order.

    `train_labels` are the classes of the training rows per target: a class that no hidden row has is a class.
    Raises `ConfigError` where the table cannot be the truth: an id twice, a target that is no number.
    """

    spec: TableSpec
    table: CsvTable
    train_labels: tuple[tuple[str, ...], ...] = ()

    def __post_init__(self) -> None:
        if len(set(self._keys)) != len(self._keys):
            raise ConfigError(f"task: two hidden rows have the same {self.spec.id_column}")
        if self.spec.form in (Form.SCORE, Form.PROBABILITY):
            for target, labels in zip(self.spec.targets, self.labels, strict=True):
                if len(labels) > 2:
                    raise ConfigError(f"task: {self.spec.metric} needs two classes, and {target} has {len(labels)}")
        truth = self.truth  # a cell that is no number is found now
        if (
            self.spec.form is Form.PROBABILITY
            and len(truth) > 1
            and any(sum(row) != 1 for row in zip(*truth, strict=True))
        ):
            raise ConfigError(
                f"task: {self.spec.metric} over several columns needs one 1 and else 0 in every hidden row"
            )

    @property
    def columns(self) -> dict[str, ColumnKind]:
        return self.spec.columns([spelling.numeric for spelling in self._spellings])

    @property
    def classes(self) -> bool:
        return self.spec.form in (Form.LABEL, Form.SCORE, Form.PROBABILITY, Form.RANKED)

    @cached_property
    def labels(self) -> list[list[str]]:
        """Per target its classes in order, numbers by size; empty where there are none."""
        if not self.classes:
            return [[] for _ in self.spec.targets]
        known = []
        for place, spelling in enumerate(self._spellings):
            cells = [*self._column(place), *(self.train_labels[place] if self.train_labels else ())]
            labels = spelling.sorted([spelling.key(cell) for cell in cells])
            # A column that holds but one of them is still one of zeros and ones.
            zero_one = self.spec.form in (Form.SCORE, Form.PROBABILITY) and set(labels) <= {"0", "1"}
            known.append(["0", "1"] if zero_one else labels)
        return known

    @cached_property
    def truth(self) -> list[list[Any]]:
        """Per target, in the order of the hidden rows: places in `labels`, numbers, or texts."""
        columns: list[list[Any]] = []
        for place, target in enumerate(self.spec.targets):
            cells = self._column(place)
            if self.classes:
                places = {label: i for i, label in enumerate(self.labels[place])}
                columns.append([places[self._spellings[place].key(cell)] for cell in cells])
            elif self.spec.form is Form.NUMBER:
                columns.append([_true_number(cell, target) for cell in cells])
            else:
                columns.append(cells)
        return columns

    @cached_property
    def _ids(self) -> Spelling:
        return Spelling.of([row[0] for row in self.table.rows])

    @cached_property
    def _keys(self) -> list[str]:
        return [self._ids.key(row[0]) for row in self.table.rows]

    @cached_property
    def _spellings(self) -> list[Spelling]:
        train: Sequence[Sequence[str]] = self.train_labels or [()] * len(self.spec.targets)
        return [Spelling.of_labels([*self._column(place), *train[place]]) for place in range(len(self.spec.targets))]

    def _column(self, place: int) -> list[str]:
        return [row[1 + place] for row in self.table.rows]

    def aligned(self, submission: CsvTable) -> list[list[Any]]:
        """The predictions in the order of `truth`.

        Raises:
            Refused: an id is missing, too many or twice, or a cell is not of its form.
        """
        rows: dict[str, Sequence[str]] = {}
        for row in submission.rows:
            key = self._ids.key(row[0])
            if key in rows:
                raise Refused(Fault.DUPLICATE_KEY, f"id {_shown(row[0])} a second time")
            rows[key] = row[1:]
        missing = [key for key in self._keys if key not in rows]
        if missing:
            detail = f"{len(missing)} of {len(self._keys)} ids are missing, the first is {_shown(missing[0])}"
            raise Refused(SubmissionFault.MISSING_ID, detail)
        if len(rows) > len(self._keys):
            known = set(self._keys)
            extra = next(key for key in rows if key not in known)
            detail = f"{len(rows) - len(self._keys)} ids are not of the test rows, the first is {_shown(extra)}"
            raise Refused(SubmissionFault.EXTRA_ID, detail)
        places = range(len(self.spec.targets))
        predicted = [[self._cell(place, rows[key][place]) for key in self._keys] for place in places]
        if (
            self.spec.form is Form.PROBABILITY
            and len(predicted) > 1
            and not all(map(any, zip(*predicted, strict=True)))
        ):
            raise Refused(SubmissionFault.NOT_A_PROBABILITY, "a row in which all probabilities are 0")
        return predicted

    def _cell(self, place: int, cell: str) -> Any:
        target, form = self.spec.targets[place], self.spec.form
        if form is Form.TEXT:
            return cell
        if form is Form.LABEL:
            return self._label(place, cell)
        if form is Form.RANKED:
            words = cell.split()
            if not words:
                raise Refused(Fault.EMPTY_CELL, f"column {_shown(target)}: no class named")
            return " ".join(str(self._label(place, word)) for word in words)
        value = float(cell)
        if form is Form.PROBABILITY and not 0 <= value <= 1:
            raise Refused(SubmissionFault.NOT_A_PROBABILITY, f"column {_shown(target)}: {_shown(cell)}")
        if abs(value) > MAX_SIZE or (value < 0 and METRICS[self.spec.metric].non_negative):
            limit = "must not be below 0" if value < 0 and abs(value) <= MAX_SIZE else "is too large"
            raise Refused(SubmissionFault.OUT_OF_RANGE, f"column {_shown(target)}: {_shown(cell)} {limit}")
        return value

    def _label(self, place: int, cell: str) -> int:
        key = self._spellings[place].key(cell)
        index = self._places[place].get(key)
        if index is None:
            known = ", ".join(self.labels[place][:8])
            detail = f"column {_shown(self.spec.targets[place])}: {_shown(cell)} is no class; classes are {known}"
            raise Refused(SubmissionFault.UNKNOWN_LABEL, detail[:300])
        return index

    @cached_property
    def _places(self) -> list[dict[str, int]]:
        return [{label: i for i, label in enumerate(labels)} for labels in self.labels]


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """`metrics` of a submission that is valid; a `fault` and its `detail` of one that is not."""

    metrics: Mapping[str, float]
    fault: str = ""
    detail: str = ""

    @property
    def valid(self) -> bool:
        return not self.fault


def score(submission: CsvTable | CsvRefused, answers: Answers, process: MetricProcess) -> Score:
    """Scores what was read with `answers.columns`; see `metrics.measure` for the names.

    Raises:
        InfrastructureError: the metrics could not be computed, which says nothing of the submission.
    """
    if isinstance(submission, CsvRefused):
        return Score(metrics={}, fault=submission.fault.value, detail=submission.detail)
    try:
        predicted = answers.aligned(submission)
    except Refused as refused:
        return Score(metrics={}, fault=refused.fault.value, detail=str(refused))
    return Score(metrics=process.measure(arguments(answers, predicted)))


def arguments(answers: Answers, predicted: list[list[Any]]) -> dict[str, Any]:
    """What `metrics.measure` is called with."""
    return {
        "form": answers.spec.form.value,
        "metric": answers.spec.metric,
        "truth": answers.truth,
        "predicted": predicted,
        "labels": answers.labels,
    }


def _true_number(cell: str, target: str) -> float:
    value = float(cell) if plain_number(cell) is not None else math.nan
    if not abs(value) <= MAX_SIZE:
        raise ConfigError(f"task: the hidden answers hold {_shown(cell)} in {target}, which is no number")
    return value


def _shown(text: str) -> str:
    shown = ascii(text)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."
