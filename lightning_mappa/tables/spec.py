"""What a task on tables asks for: which columns, of what form, and how they are scored."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from enum import StrEnum
from typing import Literal

from lightning_mappa.errors import ConfigError
from lightning_mappa.tasks.csv_file import ColumnKind


class Form(StrEnum):
    """What the cells of a target column are, in a submission."""

    LABEL = "label"
    """One of the task's classes."""
    SCORE = "score"
    """A number that is larger where the positive class is more likely."""
    PROBABILITY = "probability"
    """Of the positive class; over several columns, of each of them."""
    NUMBER = "number"
    RANKED = "ranked"
    """Up to three classes, the likeliest first, separated by spaces."""
    TEXT = "text"


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    form: Form
    higher_is_better: bool
    non_negative: bool = False
    """Predictions below zero are refused: the metric has no value for them."""


METRICS: Mapping[str, Metric] = {
    **dict.fromkeys(
        ("accuracy", "f1", "f1_micro", "f1_macro", "f1_weighted", "quadratic_weighted_kappa", "mcc"),
        Metric(form=Form.LABEL, higher_is_better=True),
    ),
    **dict.fromkeys(("roc_auc", "normalized_gini"), Metric(form=Form.SCORE, higher_is_better=True)),
    "log_loss": Metric(form=Form.PROBABILITY, higher_is_better=False),
    **dict.fromkeys(("r2", "pearson", "spearman"), Metric(form=Form.NUMBER, higher_is_better=True)),
    **dict.fromkeys(
        ("rmse", "mse", "mae", "medae", "smape", "mcrmse"), Metric(form=Form.NUMBER, higher_is_better=False)
    ),
    "rmsle": Metric(form=Form.NUMBER, higher_is_better=False, non_negative=True),
    "map_at_3": Metric(form=Form.RANKED, higher_is_better=True),
    "jaccard": Metric(form=Form.TEXT, higher_is_better=True),
}
"""By the names that task files use. Over several targets each is the mean over columns, but for log_loss, whose
columns are then the classes."""

ALIASES: Mapping[str, str] = {"qwk": "quadratic_weighted_kappa"}

Kind = Literal["classification", "regression", "text"]
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_MAX_EXPONENT = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSpec:
    """What a submission has to be.

    Raises:
        ConfigError: an unknown metric, no target, or a column named twice.
    """

    id_column: str
    targets: tuple[str, ...]
    metric: str
    """A key of `METRICS`."""

    def __post_init__(self) -> None:
        if self.metric not in METRICS:
            raise ConfigError(f"metric={self.metric}: allowed are {', '.join(METRICS)}")
        columns = (self.id_column, *self.targets)
        if not self.targets or len(set(columns)) != len(columns):
            raise ConfigError(f"columns={list(columns)}: give an id column and at least one target, each once")

    @property
    def form(self) -> Form:
        return METRICS[self.metric].form

    @property
    def kind(self) -> Kind:
        if self.form is Form.TEXT:
            return "text"
        return "regression" if self.form is Form.NUMBER else "classification"

    def columns(self, numeric_labels: Sequence[bool]) -> dict[str, ColumnKind]:
        """How a submission is read; `numeric_labels` says per target whether its classes are numbers."""
        kinds = {self.id_column: ColumnKind.KEY}
        for target, numeric in zip(self.targets, numeric_labels, strict=True):
            is_text = self.form in (Form.RANKED, Form.TEXT) or (self.form is Form.LABEL and not numeric)
            kinds[target] = ColumnKind.TEXT if is_text else ColumnKind.NUMBER
        return kinds


def plain_number(cell: str) -> str | None:
    """The number that a cell is, in one spelling: `7`, `07`, `7.0` and `7e0` are the same; None for other text."""
    if not _NUMBER.fullmatch(cell):
        return None
    value = Decimal(cell)
    if value and abs(value.adjusted()) > _MAX_EXPONENT:
        return None
    text = format(value, "f")
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if text == "-0" else text


@dataclass(frozen=True, slots=True)
class Spelling:
    """How the cells of one column are compared: as numbers where all the true ones are, else as they stand."""

    numeric: bool

    @classmethod
    def of(cls, cells: Sequence[str]) -> Spelling:
        """Not numeric where two different cells would become one, as ids `7` and `07` would."""
        distinct = set(cells)
        numbers = {plain_number(cell) for cell in distinct}
        return cls(None not in numbers and len(numbers) == len(distinct))

    @classmethod
    def of_labels(cls, cells: Sequence[str]) -> Spelling:
        """Of classes, where `1` and `1.0` may stand in one column."""
        return cls(all(plain_number(cell) is not None for cell in set(cells)))

    def key(self, cell: str) -> str:
        number = plain_number(cell) if self.numeric else None
        return cell if number is None else number

    def sorted(self, keys: Sequence[str]) -> list[str]:
        return sorted(set(keys), key=(lambda key: (float(key), key)) if self.numeric else None)
