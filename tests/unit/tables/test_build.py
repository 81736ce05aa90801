"""Any table as a task: how it is cut, written and described."""

from __future__ import annotations

from collections import Counter

import pytest

from lightning_mappa.errors import ConfigError
from lightning_mappa.tables.build import build_task
from lightning_mappa.tables.source import Tables
from lightning_mappa.tables.spec import TableSpec
from tests.unit.tables.tables import SPLITS, rows, table

# -- the builder ------------------------------------------------------------------------------------------------------


def test_a_table_is_cut_into_what_the_team_gets_and_what_it_never_sees(tmp_path):
    build_task(tmp_path, table(), seed=1)
    public, hidden = tmp_path / "data_resplit" / "t", tmp_path / "answers" / "t" / "test_answer.csv"
    train, test, sample, truth = (
        rows(file) for file in (public / "train.csv", public / "test.csv", public / "sample_submission.csv", hidden)
    )
    assert [list(part[0]) for part in (train, test, sample, truth)] == [
        ["id", "x", "gap", "y"],
        ["id", "x", "gap"],
        ["id", "y"],
        ["id", "y"],
    ]
    assert [row["id"] for row in train + test] == [str(number) for number in range(1, 41)]
    assert [row["id"] for row in sample] == [row["id"] for row in test] == [row["id"] for row in truth]
    # A quarter of every class: 10, 10 and 20 rows of them.
    assert Counter(row["y"] for row in truth) == {"a": 2, "b": 2, "c": 5}
    # Every row is where it was: y follows from x, and the order of rows says nothing of it.
    labels = dict(zip(table().columns["x"], table().columns["y"], strict=True))
    assert all(labels[float(row["x"])] == row["y"] for row in train)
    assert all(labels[float(row["x"])] == known["y"] for row, known in zip(test, truth, strict=True))
    assert [float(row["x"]) for row in train] != sorted(float(row["x"]) for row in train)
    assert {row["gap"] for row in train} >= {""}


def test_the_same_seed_gives_the_same_files_and_no_task_is_written_over(tmp_path):
    for name, seed in (("one", 1), ("same", 1), ("other", 2)):
        build_task(tmp_path / name, table(), seed=seed)
    one, same, other = (
        {str(f.relative_to(tmp_path / name)): f.read_bytes() for f in (tmp_path / name).rglob("*.csv")}
        for name in ("one", "same", "other")
    )
    assert one == same != other
    with pytest.raises(ConfigError, match="there is a task of that name"):
        build_task(tmp_path / "one", table(), seed=1)


@pytest.mark.parametrize(
    "columns",
    [{"y": []}, {"x": [1], "y": [1, 2]}, {"x": [1, 2]}, {"y": [1, None]}],
    ids=["no", "uneven", "none", "gap"],
)
def test_a_table_that_makes_no_task(columns):
    with pytest.raises(ConfigError, match="table t: "):
        table(columns=columns)


def test_a_frame_comes_back_as_it_was(tmp_path):
    pd = pytest.importorskip("pandas")
    days = pd.to_datetime(["2024-01-02", None, "2024-01-04", "2024-01-05"] * 4)
    frame = pd.DataFrame({"number": [1234567.891, None, 1e-9, -3.0] * 4, "day": days, "flag": [True, False] * 8})
    frame["count"] = pd.array([1, None, 3, 4] * 4, dtype="Int64")
    frame["text"], frame["y"] = ["nan", "a,b", 'say "hi"', None] * 4, range(16)
    columns = frame.to_dict("list")
    build_task(tmp_path, table(columns=columns, spec=TableSpec(id_column="id", targets=("y",), metric="mae")), seed=0)
    public, hidden = tmp_path / "data_resplit" / "t", tmp_path / "answers" / "t" / "test_answer.csv"
    read = {row["y"]: row for row in rows(public / "train.csv")}
    read |= {known["y"]: row for row, known in zip(rows(public / "test.csv"), rows(hidden), strict=True)}
    assert [[read[str(y)][name] for name in ("number", "day", "flag", "count", "text")] for y in range(4)] == [
        ["1234567.891", "2024-01-02 00:00:00", "True", "1", "nan"],
        ["", "", "False", "", "a,b"],
        ["1e-09", "2024-01-04 00:00:00", "True", "3", 'say "hi"'],
        ["-3", "2024-01-05 00:00:00", "False", "4", ""],
    ]
    with pytest.raises(ConfigError, match="a target is missing in some row"):
        table(columns={"x": [1, 2], "y": [1.0, float("nan")]})


def test_samples_of_every_form_are_valid_submissions(tmp_path, workspace):
    """Those that are written, and those that are made for a task without one."""
    forms = [
        ("accuracy", {"y": ["a", "b"] * 8}, None),
        ("map_at_3", {"y": ["a", "b"] * 8}, None),
        ("roc_auc", {"y": [0, 1] * 8}, "0.5"),
        ("log_loss", {"y": [0, 1] * 8}, "0.5"),
        ("log_loss", {"p": [0, 1, 0] * 8, "q": [1, 0, 0] * 8, "r": [0, 0, 1] * 8}, "0.333333"),
        ("rmsle", {"y": [0.5, 1] * 8}, "0"),
        ("jaccard", {"y": ["so it is", "no"] * 8}, None),
    ]
    cells = {}
    for place, (metric, targets, cell) in enumerate(forms):
        spec = TableSpec(id_column="id", targets=tuple(targets), metric=metric)
        for name in (f"{place}-with", f"{place}-without"):
            split = ("report", "selection")[place] if place < 2 else "train"
            build_task(tmp_path / "t", table(name, columns=targets, spec=spec), seed=0, split=split)
            cells[f"table-{name}"] = cell
        (tmp_path / "t" / "data_resplit" / f"{place}-without" / "sample_submission.csv").unlink()
    source = Tables(str(tmp_path / "t"))
    tasks = [task for split in SPLITS for task in source.tasks(split)]
    assert len(tasks) == 2 * len(forms)
    for task in tasks:
        source.hand_out(task, workspace)
        sample = rows(workspace / "sample_submission.csv")
        if cells[task.id] is not None:
            assert {row[target] for row in sample for target in task.metadata["targets"]} == {cells[task.id]}
        (workspace / "sample_submission.csv").replace(workspace / "submission.csv")
        grade = source.grade_files(task, workspace)
        assert (grade.outcome, grade.fault) == (1.0, ""), grade
    source.close()


def test_ids_of_the_table_are_kept(tmp_path):
    columns = {"y": list(range(8)), "id": [f"r{row}" for row in range(8)], "x": [0] * 8}
    build_task(tmp_path, table(metric="mae", columns=columns), seed=0)
    truth = rows(tmp_path / "answers" / "t" / "test_answer.csv")
    assert {row["id"] for row in truth} == {f"r{row['y']}" for row in truth}
    assert list(rows(tmp_path / "data_resplit" / "t" / "train.csv")[0]) == ["id", "x", "y"]
