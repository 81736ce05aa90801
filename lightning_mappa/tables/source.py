"""Tasks on tables as a `TaskSource`: shipped, generated, or read from a folder."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, get_args

from lightning_mappa.errors import ConfigError
from lightning_mappa.seeds import derive_seed
from lightning_mappa.tables.build import build_task
from lightning_mappa.tables.fair import FAIR, Fair, fair_metrics
from lightning_mappa.tables.folder import FILES, SAMPLE, SUBMISSION, TableTask, read_folder
from lightning_mappa.tables.metric_process import MetricProcess
from lightning_mappa.tables.scoring import Answers, score
from lightning_mappa.tables.shipped import build_shipped
from lightning_mappa.tables.spec import METRICS
from lightning_mappa.tables.synthetic import generated_tables, kind_of
from lightning_mappa.tasks.base import Grade, Split
from lightning_mappa.tasks.csv_file import Fault
from lightning_mappa.tasks.grading_process import CsvLimits, CsvRefused, CsvTable, read_csv
from lightning_mappa.tools.collector import CollectLimits, collect
from lightning_mappa.types import Task

logger = logging.getLogger(__name__)

_SPLITS: tuple[Split, ...] = get_args(Split)


class Tables:
    """`tasks.base.TaskSource` and `HandsOutFiles`: success is a valid submission.csv, metrics say how good it is.

    Without `path` the tables are the shipped ones, written to a private folder outside of every workspace and
    removed with this object. Splits are those that the texts name; tasks without one are drawn by the seed, in the
    same shares from classification and regression. In every split the two kinds take turns.

    Args:
        path: a folder with DSBench's `data_resplit` and `answers`.
        texts: the cleaned texts of that folder's tasks; None is its `tasks.json`.
        report: names of tasks that form the report split, where texts name none.
        generated: split → how many tables to generate for it from the seed; they take the place of the split's own.
        fair: what a failed run counts as in `fair/…`; see `fair_metrics`.

    Raises:
        ConfigError: a value out of range, a folder that is not as it should be, an empty split.
    """

    def __init__(
        self,
        path: str | None = None,
        *,
        texts: str | None = None,
        seed: int = 0,
        report: Sequence[str] = (),
        generated: Mapping[str, int] | None = None,
        fair: Fair = "paper",
    ) -> None:
        if fair not in FAIR:
            raise ConfigError(f"task.fair={fair}: allowed are {', '.join(FAIR)}")
        counts = _counts(generated or {})
        self._fair: Fair = fair
        self._process = MetricProcess()
        self._folder = tempfile.TemporaryDirectory(prefix="mappa-tables-", ignore_cleanup_errors=True)
        of_split = _divide(self._read(path, texts, counts), seed, list(report)) if not all(counts.values()) else {}
        for split, count in counts.items():
            if count:
                of_split[split] = self._generate(seed, split, count)
        empty = [split for split in _SPLITS if not of_split.get(split)]
        if empty:
            raise ConfigError(f"task.path={path}: no task for the split {empty[0]}; set task.generated.{empty[0]}=8")
        self._tables = {f"table-{table.name}": table for split in _SPLITS for table in of_split[split]}
        self._tasks = {split: tuple(_task(table) for table in _in_turn(of_split[split])) for split in _SPLITS}

    def tasks(self, split: Split) -> Sequence[Task]:
        return self._tasks[split]

    def answer(self, text: str) -> str | None:
        """None: what counts is the file."""
        return None

    def grade(self, task: Task, answer: str | None) -> float | None:
        """None: what counts is the file."""
        return None

    def hand_out(self, task: Task, workspace: Path) -> None:
        table = self._table(task)
        for name in FILES:
            if (file := table.public / name).is_file():
                shutil.copyfile(file, workspace / name)
            elif name == SAMPLE:
                table.write_sample(workspace / name)
            # Programs may run as another user; the folder itself lets nobody else in.
            (workspace / name).chmod(0o666)

    def grade_files(self, task: Task, workspace: Path) -> Grade:
        answers = self._table(task).answers
        read = _read_submission(workspace, answers)
        found = score(read, answers, self._process)
        metrics = {**found.metrics, **fair_metrics(found, answers, self._fair)}
        if not found.valid:
            return Grade(outcome=0.0, metrics=metrics, fault=found.fault, detail=found.detail)
        spec = answers.spec
        value = found.metrics.get("score")
        shown = f"{SUBMISSION}, {spec.metric} " + ("undefined" if value is None else f"{value:.4g}")
        return Grade(outcome=1.0, answer=shown, metrics=metrics)

    def _table(self, task: Task) -> TableTask:
        if task.id not in self._tables:
            raise ConfigError(f"inputs: {task.id} is no task of this source; a table cannot be given as a text")
        return self._tables[task.id]

    def close(self) -> None:
        """Ends the process that computes metrics and removes the tables that were written."""
        self._process.close()
        self._folder.cleanup()

    def _read(self, path: str | None, texts: str | None, counts: Mapping[Split, int]) -> list[TableTask]:
        if path is not None:
            return read_folder(path, texts)
        if texts is not None:
            raise ConfigError(f"task.texts={texts}: give task.path too, the folder that the texts are about")
        shipped = Path(self._folder.name) / "shipped"
        shipped.mkdir()
        build_shipped(shipped)
        return read_folder(shipped)

    def _generate(self, seed: int, split: Split, count: int) -> list[TableTask]:
        root = Path(self._folder.name) / f"generated-{split}"
        for number, table in enumerate(generated_tables(seed, split, count)):
            build_task(root, table, seed=seed, split=split, kind=kind_of(number))
        return read_folder(root)


def _read_submission(workspace: Path, answers: Answers) -> CsvTable | CsvRefused:
    """From a copy that no program can change any more."""
    with tempfile.TemporaryDirectory(prefix="mappa-grading-") as folder:
        copies, limits = Path(folder) / "taken", _limits(len(answers.table.rows))
        try:
            listing = collect(workspace, [SUBMISSION], copies, CollectLimits(file_bytes=limits.file_bytes))
        except OSError as error:  # a program took away the right to open its own folder
            return CsvRefused(fault=Fault.MISSING, detail=f"the folder cannot be opened ({error.strerror})")
        for entry in listing.refused:
            if entry.path == SUBMISSION:
                return CsvRefused(fault=Fault.MISSING, detail=f"{SUBMISSION} is not taken: {entry.reason.value}")
        return read_csv(copies / SUBMISSION, answers.columns, limits)


def _limits(n_rows: int) -> CsvLimits:
    """Room for every id, and for twice as many before too many rows are no longer counted one by one."""
    usual = CsvLimits()
    return CsvLimits(rows=max(usual.rows, 2 * n_rows), file_bytes=max(usual.file_bytes, 256 * n_rows))


def _counts(generated: Mapping[str, int]) -> dict[Split, int]:
    unknown = [name for name in generated if name not in _SPLITS]
    if unknown:
        raise ConfigError(f"task.generated.{unknown[0]}: allowed splits are {', '.join(_SPLITS)}")
    counts: dict[Split, int] = {split: int(generated.get(split, 0)) for split in _SPLITS}
    for split, count in counts.items():
        if count < 0:
            raise ConfigError(f"task.generated.{split}={count}: must be at least 0")
    return counts


def _divide(tables: Sequence[TableTask], seed: int, report: Sequence[str]) -> dict[Split, list[TableTask]]:
    """By the split that a task names, by `report`, else by the seed: of each kind 1/6 to select, and as many to
    report on where no task is named for that."""
    names = {table.name for table in tables}
    for name in report:
        if name not in names:
            raise ConfigError(f"task.report: there is no task {name}")
    parts: dict[Split, list[TableTask]] = {split: [] for split in _SPLITS}
    free: dict[str, list[TableTask]] = {}
    for table in tables:
        if table.name in report:
            parts["report"].append(table)
        elif table.split is None:
            free.setdefault(table.spec.kind, []).append(table)
        elif table.split in parts:
            parts[table.split].append(table)
        else:
            raise ConfigError(f"task {table.name}: split is {table.split}; allowed are {', '.join(_SPLITS)}")
    held_back = bool(parts["report"])
    for group in free.values():
        group.sort(key=lambda table: derive_seed("tables", seed, table.name))
        size = max(1, round(len(group) / 6)) if len(group) > 1 else 0
        parts["selection"] += group[:size]
        reported = 0 if held_back else size
        parts["report"] += group[size : size + reported]
        parts["train"] += group[size + reported :]
    return parts


def _in_turn(tables: Sequence[TableTask]) -> list[TableTask]:
    kinds: dict[str, list[TableTask]] = {}
    for table in tables:
        kinds.setdefault(table.spec.kind, []).append(table)
    rows = zip_longest(*(kinds[kind] for kind in sorted(kinds)))
    return [table for row in rows for table in row if table is not None]


def _task(table: TableTask) -> Task:
    spec = table.spec
    metadata: dict[str, Any] = {
        "files": list(FILES),
        "columns": list(table.columns),
        "id_column": spec.id_column,
        "targets": list(spec.targets),
        "metric": spec.metric,
        "higher_is_better": METRICS[spec.metric].higher_is_better,
        "type": spec.kind,
        "table_kind": table.kind,
        "sample": table.sample,
        "table_fingerprint": table.fingerprint,
    }
    return Task(id=f"table-{table.name}", kind=f"tables/{spec.kind}", prompt=table.text, metadata=metadata)
