import json
from dataclasses import replace

import pytest

from lightning_mappa.errors import ConfigError
from lightning_mappa.splits import keep_splits
from lightning_mappa.types import Task

TASKS = [Task(id=f"t{i}", kind="k", prompt=f"{i} + 1?", reference=str(i + 1)) for i in range(3)]


def test_ids_are_kept_in_order_and_the_same_tasks_pass(tmp_path):
    path = tmp_path / "splits.json"
    keep_splits(path, {"train": TASKS, "selection": TASKS[:1]})
    written = path.read_text()
    assert json.loads(written)["train"]["ids"] == ["t0", "t1", "t2"]
    assert json.loads(written)["selection"]["n"] == 1
    keep_splits(path, {"train": TASKS, "selection": TASKS[:1]})
    assert path.read_text() == written


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        (TASKS[:2], "the train split has 2 tasks instead of 3"),
        ([*TASKS[:2], replace(TASKS[2], prompt="9?")], "the train split has other tasks"),
        ([*TASKS[:2], replace(TASKS[2], reference="9")], "the train split has other tasks"),
        ([*TASKS[:2], replace(TASKS[2], metadata={"stratum": "9"})], "the train split has other tasks"),
        (TASKS[::-1], "the train split has other tasks"),
    ],
)
def test_other_tasks_are_refused(tmp_path, changed, sentence):
    keep_splits(tmp_path / "splits.json", {"train": TASKS})
    with pytest.raises(ConfigError, match=sentence):
        keep_splits(tmp_path / "splits.json", {"train": changed})
