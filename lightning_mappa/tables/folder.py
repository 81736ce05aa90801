"""Reads tasks from a folder in DSBench's layout: ours (`build`), or the real one with its file of cleaned texts."""

from __future__ import annotations

import csv
import hashlib
import json
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from lightning_mappa.errors import ConfigError
from lightning_mappa.tables.build import TEXTS, sample_rows, write_csv
from lightning_mappa.tables.scoring import Answers
from lightning_mappa.tables.spec import ALIASES, Form, TableSpec
from lightning_mappa.tasks.grading_process import CsvTable

logger = logging.getLogger(__name__)

SUBMISSION = "submission.csv"
SAMPLE = "sample_submission.csv"
FILES = ("train.csv", "test.csv", SAMPLE)
"""What a team finds in its folder."""
_SAMPLE_LINES = 4
_FINGERPRINT_BYTES = 1 << 16


@dataclass(frozen=True)
class TableTask:
    """One task of a folder. Files are read when they are asked for, and answers kept."""

    name: str
    text: str
    """What agents read."""
    spec: TableSpec
    split: str | None
    kind: str
    public: Path
    answer_file: Path

    @cached_property
    def answers(self) -> Answers:
        """Raises `ConfigError` where the hidden file cannot be the truth of `spec`."""
        columns = (self.spec.id_column, *self.spec.targets)
        rows = tuple(tuple(row) for row in _rows_of(self.answer_file, columns))
        table = CsvTable(columns=columns, rows=rows)
        labels = self._train_labels() if self.spec.kind == "classification" else ()
        return Answers(self.spec, table, labels)

    @cached_property
    def columns(self) -> tuple[str, ...]:
        """Of train.csv."""
        return tuple(_header(self.public / "train.csv"))

    @cached_property
    def fingerprint(self) -> str:
        """Of the beginning of train.csv: texts of generated tables may be the same, the tables are not."""
        with (self.public / "train.csv").open("rb") as file:
            return hashlib.sha256(file.read(_FINGERPRINT_BYTES)).hexdigest()[:16]

    @cached_property
    def sample(self) -> str:
        """The first lines of a submission, each with its end."""
        if (file := self.public / SAMPLE).is_file():
            with file.open(encoding="utf-8-sig") as lines:
                return "".join(line for line, _ in zip(lines, range(_SAMPLE_LINES), strict=False))
        lines_of = [",".join(row) for row in self._sample_rows()[: _SAMPLE_LINES - 1]]
        return "\n".join([",".join((self.spec.id_column, *self.spec.targets)), *lines_of, ""])

    def write_sample(self, file: Path) -> None:
        """For a task that comes without one: valid, and wrong."""
        write_csv(file, (self.spec.id_column, *self.spec.targets), self._sample_rows())

    def _sample_rows(self) -> list[list[str]]:
        needs_label = self.spec.form in (Form.LABEL, Form.RANKED, Form.TEXT)
        label = next(_rows_of(self.public / "train.csv", self.spec.targets))[0] if needs_label else ""
        ids = (row[0] for row in _rows_of(self.public / "test.csv", (self.spec.id_column,)))
        return sample_rows(ids, self.spec, label)

    def _train_labels(self) -> tuple[tuple[str, ...], ...]:
        seen: list[dict[str, None]] = [{} for _ in self.spec.targets]
        for row in _rows_of(self.public / "train.csv", self.spec.targets):
            for known, cell in zip(seen, row, strict=True):
                if cell:
                    known[cell] = None
        return tuple(map(tuple, seen))


def read_folder(path: str | Path, texts: str | Path | None = None) -> list[TableTask]:
    """The tasks of a folder that holds `data_resplit` and `answers`, in the order of their names.

    `texts` is a JSON object from name to `cleaned_prompt`, `metric`, `target_column` (one or a list) and `id_column`;
    None takes `tasks.json` in the folder. A folder without a text is left out with a warning, a text without a
    folder in silence.

    Raises:
        ConfigError: nothing is there, or a text or file is not as it should be; names it.
    """
    root = Path(path).expanduser()
    text_file = root / TEXTS if texts is None else Path(texts).expanduser()
    try:
        described = json.loads(text_file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or f"it is not JSON: {error}"
        raise ConfigError(f"task.texts={text_file}: the file cannot be read ({reason})") from error
    if not isinstance(described, dict):
        raise ConfigError(f"task.texts={text_file}: it is not an object from task names to their texts")
    public = root / "data_resplit"
    names = sorted(entry.name for entry in public.iterdir() if entry.is_dir()) if public.is_dir() else []
    without = [name for name in names if name not in described]
    if without:
        logger.warning("Tables without a text in %s are left out: %s", text_file, ", ".join(without))
    tasks = [_task(root, name, described[name]) for name in names if name in described]
    if not tasks:
        raise ConfigError(f"task.path={root}: no folder below data_resplit has a text in {text_file}")
    return tasks


def _task(root: Path, name: str, text: Any) -> TableTask:
    where = f"task {name}"
    needed = ("cleaned_prompt", "metric", "target_column", "id_column")
    lacking = [key for key in needed if not isinstance(text, Mapping) or not text.get(key)]
    if lacking:
        raise ConfigError(f"{where}: its text has no {' and no '.join(lacking)}")
    public, answer_file = root / "data_resplit" / name, root / "answers" / name / "test_answer.csv"
    for file in (public / "train.csv", public / "test.csv", answer_file):
        if not file.is_file():
            raise ConfigError(f"{where}: there is no file {file}")
    metric = ALIASES.get(text["metric"], text["metric"])
    hidden = _header(answer_file)
    targets = [text["target_column"]] if isinstance(text["target_column"], str) else list(text["target_column"])
    if not set(targets) & set(hidden):  # such as a word for "all thirty of them"
        targets = [column for column in hidden if column != text["id_column"]]
    for column in (text["id_column"], *targets):
        if column not in hidden:
            raise ConfigError(f"{where}: {answer_file} has no column {column}; its columns are {', '.join(hidden)}")
    try:
        spec = TableSpec(id_column=text["id_column"], targets=tuple(targets), metric=metric)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    return TableTask(
        name=name,
        text=str(text["cleaned_prompt"]).strip(),
        spec=spec,
        split=text.get("split"),
        kind=str(text.get("kind", spec.kind)),
        public=public,
        answer_file=answer_file,
    )


def _header(file: Path) -> list[str]:
    csv.field_size_limit(sys.maxsize)
    with file.open(encoding="utf-8-sig", newline="") as stream:
        return next(csv.reader(stream), [])


def _rows_of(file: Path, columns: Sequence[str]) -> Iterator[list[str]]:
    """These columns of a file of the task's owner, row by row."""
    with file.open(encoding="utf-8-sig", newline="") as stream:
        reader = csv.reader(stream)
        header = next(reader, [])
        missing = [column for column in columns if column not in header]
        if missing:
            raise ConfigError(f"{file} has no column {missing[0]}; its columns are {', '.join(header)[:200]}")
        places = [header.index(column) for column in columns]
        for row in reader:
            if row:
                if len(row) != len(header):
                    raise ConfigError(f"{file}, line {reader.line_num}: {len(row)} cells under {len(header)} names")
                yield [row[place] for place in places]
