"""Tasks on tables: what is shipped and generated, what a team is given, and what becomes of its folder."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_mappa.errors import ConfigError
from lightning_mappa.tables.build import build_task
from lightning_mappa.tables.source import Tables
from lightning_mappa.tables.synthetic import KINDS, generated_tables
from lightning_mappa.types import Task
from tests.unit.tables.tables import SPLITS, rows, table


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
