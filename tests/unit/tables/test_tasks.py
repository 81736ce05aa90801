"""Tasks on tables: what is built, what is shipped, what is read from folders, what a team is given and handed back."""

from __future__ import annotations

import csv
import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_mappa.errors import ConfigError
from lightning_mappa.tables.build import Table, build_task
from lightning_mappa.tables.folder import read_folder
from lightning_mappa.tables.source import Tables
from lightning_mappa.tables.spec import TableSpec
from lightning_mappa.tables.synthetic import KINDS, generated_tables
from lightning_mappa.types import Task

SPLITS = ("train", "selection", "report")


@pytest.fixture(scope="module")
def source() -> Iterator[Tables]:
    source = Tables()
    yield source
    source.close()


@pytest.fixture(scope="module")
def generated() -> Iterator[Tables]:
    source = Tables(generated={"train": 1, "selection": 1, "report": 24})
    yield source
    source.close()


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    folder = tmp_path / "workspace"
    folder.mkdir()
    return folder


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


# -- shipped and generated --------------------------------------------------------------------------------------------


def test_twelve_shipped_tables_in_splits_that_are_balanced_by_kind(source):
    kinds = {split: Counter(task.kind for task in source.tasks(split)) for split in SPLITS}
    assert kinds == {
        split: {"tables/classification": n, "tables/regression": n} for split, n in zip(SPLITS, (4, 1, 1), strict=True)
    }
    tasks = [task for split in SPLITS for task in source.tasks(split)]
    assert len({task.id for task in tasks}) == 12
    wanted = {"binary", "three_class", "imbalanced", "text_labels", "skewed", "multi_target", "numbers"}
    assert {task.metadata["table_kind"] for task in tasks} >= wanted
    assert [task.kind for task in source.tasks("train")][:2] == ["tables/classification", "tables/regression"]


def test_what_was_written_is_private_and_goes_with_the_source():
    source = Tables(generated=dict.fromkeys(SPLITS, 1))
    folder = Path(source._folder.name)
    assert folder.stat().st_mode & 0o777 == 0o700
    source.close()
    assert not folder.exists()


def test_generated_tables_are_a_function_of_seed_and_group():
    assert generated_tables(1, "report", 24) == generated_tables(1, "report", 24)
    assert generated_tables(1, "report", 2) == generated_tables(1, "report", 24)[:2]
    texts = {
        str(table.columns) for seed in (1, 2) for g in ("report", "train") for table in generated_tables(seed, g, 24)
    }
    assert len(texts) == 96


def test_generated_tables_have_every_kind_of_column_and_target(generated):
    tasks = generated.tasks("report")
    assert len(tasks) == 24
    assert Counter(task.metadata["table_kind"] for task in tasks) == dict.fromkeys(KINDS, 3)
    assert Counter(task.kind for task in tasks) == {"tables/classification": 12, "tables/regression": 12}
    tables = generated_tables(0, "report", 24)
    assert all(any(None in cells for cells in table.columns.values()) for table in tables)
    assert sum(any(str(cells[-1]).startswith("2023-") for cells in t.columns.values()) for t in tables) > 8
    imbalanced = next(t for t in tables if t.spec.targets[0].startswith("is_") and t.spec.metric in ("f1", "roc_auc"))
    assert set(imbalanced.columns[imbalanced.spec.targets[0]]) == {0, 1}


def test_a_plain_model_finds_what_is_in_every_table(source, generated, workspace):
    """On what the team gets alone, and scored by the task itself: far better than a guess."""
    played = [(source, task) for split in SPLITS for task in source.tasks(split)]
    for given, task in [*played, *((generated, task) for task in generated.tasks("report")[: len(KINDS)])]:
        given.hand_out(task, workspace)
        predict(task, workspace)
        grade = given.grade_files(task, workspace)
        assert grade.outcome == 1.0, (task.id, grade)
        if task.metadata["type"] == "classification":
            assert grade.metrics.get("roc_auc", grade.metrics["accuracy"]) > 0.68, (task.id, grade)
        else:
            assert grade.metrics["rmse_percent"] < 0.82 * constant_error(given, task), (task.id, grade)


def predict(task: Task, folder: Path) -> None:
    """Writes a submission by a ridge or logistic regression on numbers, categories and the day of the year."""
    import numpy as np
    import pandas as pd
    from sklearn.linear_model import LogisticRegression, Ridge
    from sklearn.preprocessing import StandardScaler

    meta = task.metadata
    train, test = pd.read_csv(folder / "train.csv"), pd.read_csv(folder / "test.csv")
    both = pd.concat([train, test])[[c for c in meta["columns"] if c not in (meta["id_column"], *meta["targets"])]]
    for name in both.columns:
        if str(both[name].dropna().iloc[0]).startswith("2023-"):
            angle = 2 * np.pi * pd.to_datetime(both[name]).dt.dayofyear / 365
            both[f"{name}_sin"] = np.sin(angle)
            both = both.drop(columns=name)
    features = pd.get_dummies(both)
    features = features.fillna(features.mean())
    scaled = StandardScaler().fit(features[: len(train)]).transform(features)
    out = pd.DataFrame({meta["id_column"]: test[meta["id_column"]]})
    for target in meta["targets"]:
        y = train[target]
        if meta["type"] == "classification":
            model = LogisticRegression(max_iter=300).fit(scaled[: len(train)], y)
            hard = meta["metric"] not in ("roc_auc", "log_loss")
            rest = scaled[len(train) :]
            out[target] = model.predict(rest) if hard else model.predict_proba(rest)[:, 1]
        elif meta["metric"] in ("rmsle", "smape"):
            out[target] = np.exp(Ridge().fit(scaled[: len(train)], np.log(y)).predict(scaled[len(train) :]))
        else:
            out[target] = Ridge().fit(scaled[: len(train)], y).predict(scaled[len(train) :])
    out.to_csv(folder / "submission.csv", index=False)


def constant_error(source: Tables, task: Task) -> float:
    from lightning_mappa.tables.fair import chance_level

    return chance_level(source._tables[task.id].answers)["rmse_percent"]


# -- what a team gets, and what becomes of its folder -----------------------------------------------------------------


def test_agents_are_told_all_but_the_answers(source, workspace):
    for split in SPLITS:
        for task in source.tasks(split):
            source.hand_out(task, workspace)
            assert sorted(path.name for path in workspace.iterdir()) == sorted(task.metadata["files"])
            assert task.reference is None
            told = json.dumps(dict(task.metadata)) + task.prompt
            assert source._folder.name not in told
            assert task.metadata["sample"] == "".join(
                (workspace / "sample_submission.csv").read_text().splitlines(keepends=True)[:4]
            )
            assert not set(task.metadata["targets"]) & set(rows(workspace / "test.csv")[0])
            for word in (task.metadata["id_column"], *task.metadata["targets"], "submission.csv"):
                assert word in task.prompt


def test_a_sample_is_valid_and_no_submission_is_not(source, workspace):
    task = source.tasks("selection")[0]
    source.hand_out(task, workspace)
    assert source.grade_files(task, workspace).fault == "missing"
    (workspace / "submission.csv").write_bytes((workspace / "sample_submission.csv").read_bytes())
    grade = source.grade_files(task, workspace)
    assert (grade.outcome, grade.fault, grade.answer) == (1.0, "", "submission.csv, f1_macro 0.1667")
    assert grade.metrics["fair/accuracy"] == pytest.approx(1 / 3)


def test_a_text_is_no_table(source, workspace):
    with pytest.raises(ConfigError, match="inputs: input-0 is no task of this source"):
        source.hand_out(Task(id="input-0", kind="input", prompt="Predict my table."), workspace)


def test_links_folders_and_locked_folders_hold_no_submission(source, workspace):
    task = source.tasks("selection")[0]
    answers = source._tables[task.id].answer_file
    (workspace / "submission.csv").symlink_to(answers)
    grade = source.grade_files(task, workspace)
    assert (grade.outcome, grade.fault, grade.detail) == (0.0, "missing", "submission.csv is not taken: symbolic link")
    (workspace / "submission.csv").unlink()
    os.link(answers, workspace / "submission.csv")
    assert source.grade_files(task, workspace).fault == "missing"
    (workspace / "submission.csv").unlink()
    (workspace / "submission.csv").mkdir()
    assert source.grade_files(task, workspace).fault == "missing"
    assert source.grade_files(task, workspace / "gone").fault == "missing"


@pytest.mark.parametrize(
    ("fair", "expected"), [("paper", {"fair/accuracy": 0.5, "fair/f1": 0.0}), ("chance", {"fair/accuracy": 1 / 3})]
)
def test_a_failed_run_counts_as_configured(tmp_path, workspace, fair, expected):
    for name in ("a", "b", "c"):
        build_task(tmp_path, table(name), seed=0, split={"a": "train", "b": "selection", "c": "report"}[name])
    source = Tables(str(tmp_path), fair=fair)
    grade = source.grade_files(source.tasks("train")[0], workspace)
    source.close()
    assert {name: grade.metrics[name] for name in expected} == pytest.approx(expected)


# -- folders as DSBench has them --------------------------------------------------------------------------------------


@pytest.fixture
def real(tmp_path: Path) -> Path:
    """Eight tasks without a split and a sample, each with its columns in the hidden file in another order."""
    root = tmp_path / "data"
    for place in range(8):
        build_task(root, table(f"task-{place}", "accuracy" if place % 2 else "mae"), seed=place)
        (root / "data_resplit" / f"task-{place}" / "sample_submission.csv").unlink()
        hidden = root / "answers" / f"task-{place}" / "test_answer.csv"
        hidden.write_text("".join(f"{y},-,{i}\n" for i, y in csv.reader(hidden.read_text().splitlines())))
    (root / "tasks.json").rename(tmp_path / "cleaned.json")
    return root


def test_a_real_folder_is_read_by_path(real, workspace):
    source = Tables(str(real), texts=str(real.parent / "cleaned.json"), report=["task-0", "task-1"])
    assert [task.id for task in source.tasks("report")] == ["table-task-1", "table-task-0"]
    assert {split: len(source.tasks(split)) for split in SPLITS} == {"train": 4, "selection": 2, "report": 2}
    again, *others = (
        Tables(str(real), texts=str(real.parent / "cleaned.json"), report=["task-0", "task-1"], seed=seed)
        for seed in range(6)
    )
    assert again.tasks("train") == source.tasks("train")
    assert any(other.tasks("train") != source.tasks("train") for other in others)
    task = source.tasks("report")[0]
    source.hand_out(task, workspace)
    (workspace / "sample_submission.csv").rename(workspace / "submission.csv")
    assert source.grade_files(task, workspace).outcome == 1.0
    for made in (source, again, *others):
        made.close()


def test_without_names_of_the_report_split_it_is_drawn_too(real):
    source = Tables(str(real), texts=str(real.parent / "cleaned.json"))
    kinds = {split: Counter(task.kind for task in source.tasks(split)) for split in SPLITS}
    source.close()
    assert kinds["selection"] == kinds["report"] == {"tables/classification": 1, "tables/regression": 1}
    assert kinds["train"] == {"tables/classification": 2, "tables/regression": 2}


def test_a_target_that_stands_for_all_columns(real):
    texts = json.loads((real.parent / "cleaned.json").read_text())
    texts["task-0"]["target_column"] = "all of them"
    hidden = real / "answers" / "task-0" / "test_answer.csv"
    hidden.write_text("id,p,q\n31,1,2\n32,3,4\n")
    (real / "tasks.json").write_text(json.dumps(texts))
    assert read_folder(real)[0].spec.targets == ("p", "q")


def test_folders_without_a_text_are_left_out_with_a_warning(real, caplog):
    texts = json.loads((real.parent / "cleaned.json").read_text())
    texts["elsewhere"] = texts.pop("task-7")
    (real / "tasks.json").write_text(json.dumps(texts))
    assert [task.name for task in read_folder(real)] == [f"task-{place}" for place in range(7)]
    assert "task-7" in caplog.text


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"metric": "auc"}, "task task-0: metric=auc: allowed are"),
        ({"id_column": "key"}, "has no column key; its columns are y, -, id"),
        ({"target_column": ["y", "z"]}, "has no column z"),
        ({"cleaned_prompt": ""}, "task task-0: its text has no cleaned_prompt"),
        ({"split": "test"}, "task task-0: split is test; allowed are train, selection, report"),
    ],
)
def test_a_text_that_does_not_fit_is_named(real, change, match):
    texts = json.loads((real.parent / "cleaned.json").read_text())
    texts["task-0"] |= change
    (real / "tasks.json").write_text(json.dumps(texts))
    with pytest.raises(ConfigError, match=match):
        Tables(str(real))


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"fair": "kind"}, "task.fair=kind: allowed are paper, chance"),
        ({"generated": {"test": 3}}, "task.generated.test: allowed splits are"),
        ({"generated": {"train": -1}}, "task.generated.train=-1: must be at least 0"),
        ({"path": "/nowhere"}, "tasks.json: the file cannot be read"),
        ({"texts": "x.json", "generated": {"train": 1}}, "give task.path too"),
    ],
)
def test_wrong_settings_are_named(arguments, match):
    with pytest.raises(ConfigError, match=match):
        Tables(**arguments)


def test_a_split_without_a_task_is_named(tmp_path):
    build_task(tmp_path, table(), seed=0)
    with pytest.raises(ConfigError, match=r"no task for the split selection; set task.generated.selection=8"):
        Tables(str(tmp_path))
    with pytest.raises(ConfigError, match="there is no task x"):
        Tables(str(tmp_path), report=["x"])
