"""Which tasks a run has played with, kept in its folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_mappa.errors import ConfigError
from lightning_mappa.files import read_json, write_json
from lightning_mappa.types import Task


def keep_splits(path: Path, splits: Mapping[str, Sequence[Task]]) -> None:
    """Writes `path` on the first call; later ones compare.

    By split: `n`, `ids` in the order of the source, and a `sha256` over ids, prompts, reference answers and metadata;
    of a table that holds the beginning of its train.csv, and nothing of its answers.

    Raises:
        ConfigError: a split holds other tasks than when `path` was written, as when a data file was changed
            between a run and its resume.
    """
    facts = {split: _facts(tasks) for split, tasks in splits.items()}
    if not path.exists():
        write_json(path, facts)
        return
    before = read_json(path)
    for split, now in facts.items():
        was = before.get(split)
        if was != now:
            what = f"{now['n']} tasks instead of {was['n']}" if was and was["n"] != now["n"] else "other tasks"
            raise ConfigError(f"task: the {split} split has {what} since the run began ({path})")


def _facts(tasks: Sequence[Task]) -> dict[str, Any]:
    digest = hashlib.sha256()
    for task in tasks:
        facts = [task.id, task.prompt, task.reference, task.metadata]
        digest.update(json.dumps(facts, sort_keys=True, default=repr).encode())
    return {"n": len(tasks), "sha256": digest.hexdigest(), "ids": [task.id for task in tasks]}
