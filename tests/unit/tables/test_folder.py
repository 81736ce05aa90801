"""Tasks of a folder in DSBench's layout: how it is read and divided, and what is wrong with it."""

from __future__ import annotations

import csv
import json
from collections import Counter
from pathlib import Path

import pytest

from lightning_mappa.errors import ConfigError
from lightning_mappa.tables.build import build_task
from lightning_mappa.tables.folder import read_folder
from lightning_mappa.tables.source import Tables
from tests.unit.tables.tables import SPLITS, table

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
