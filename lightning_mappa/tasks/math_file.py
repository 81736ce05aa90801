"""Mathematics problems with integer answers, from a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_mappa.errors import ConfigError
from lightning_mappa.seeds import derive_seed
from lightning_mappa.tasks.base import Split
from lightning_mappa.tasks.grading import grade_integer, integer_answer, parse_gold
from lightning_mappa.tasks.json_rows import read_rows
from lightning_mappa.types import Task


class MathFile:
    """`tasks.base.TaskSource` over a JSON array, or JSON lines, of objects with `prompt` and `answer`.

    `answer` is an integer or what `grading.parse_gold` reads; `id` is optional and other keys are ignored.
    Which split a problem falls into, and its place there, come from the seed and the problem's text, not
    from its place in the file. `train_fraction` and `selection_fraction` of the problems (rounded) are the
    first two splits; the rest is the report split. Raises `ConfigError` that names the row.
    """

    def __init__(self, path: str, seed: int = 0, train_fraction: float = 0.5, selection_fraction: float = 0.25) -> None:
        tasks = _read_tasks(Path(path).expanduser())
        tasks.sort(key=lambda task: derive_seed("math_file", seed, _normalised(task.prompt)))
        train_end = round(train_fraction * len(tasks))
        selection_end = train_end + round(selection_fraction * len(tasks))
        self._tasks: dict[Split, tuple[Task, ...]] = {
            "train": tuple(tasks[:train_end]),
            "selection": tuple(tasks[train_end:selection_end]),
            "report": tuple(tasks[selection_end:]),
        }
        if min(train_fraction, selection_fraction) <= 0 or not all(self._tasks.values()):
            sizes = ", ".join(f"{split} {len(part)}" for split, part in self._tasks.items())
            raise ConfigError(
                f"task.train_fraction={train_fraction}, task.selection_fraction={selection_fraction}: the"
                f" {len(tasks)} problems of task.path={path} fall into {sizes}; no split may be empty"
            )

    def tasks(self, split: Split) -> Sequence[Task]:
        return self._tasks[split]

    def answer(self, text: str) -> str | None:
        return integer_answer(text)

    def grade(self, task: Task, answer: str | None) -> float | None:
        return None if task.reference is None else grade_integer(answer, parse_gold(task.reference))


def _read_tasks(path: Path) -> list[Task]:
    tasks: list[Task] = []
    prompts: dict[str, str] = {}
    ids: dict[str, str] = {}
    for place, row in read_rows(path, "task.path"):
        where = f"task.path={path}, {place}"
        task = _task(row, where, default_id=place.replace(" ", "-"))
        for name, key, known in (("prompt", _normalised(task.prompt), prompts), ("id", task.id, ids)):
            if key in known:
                raise ConfigError(f"{where}: the same {name} as in {known[key]}; allowed is each once")
            known[key] = place
        tasks.append(task)
    if not tasks:
        raise ConfigError(f"task.path={path}: the file holds no problems")
    return tasks


def _task(row: Any, where: str, default_id: str) -> Task:
    missing = [key for key in ("prompt", "answer") if not isinstance(row, dict) or key not in row]
    if missing:
        raise ConfigError(f"{where}: no {' and no '.join(missing)}; a row is an object with prompt and answer")
    prompt, identity = row["prompt"], row.get("id")
    if not isinstance(prompt, str) or not prompt.strip():
        raise ConfigError(f"{where}: prompt={prompt!r} is not a text")
    try:
        gold = parse_gold(row["answer"])
    except ValueError as error:
        raise ConfigError(f"{where}: answer={error}; allowed are 60, 142.0, '080 or 081'") from error
    return Task(
        id=f"math-{default_id if identity is None else identity}",
        kind="math",
        prompt=prompt,
        reference=" or ".join(map(str, sorted(gold))),
    )


def _normalised(prompt: str) -> str:
    return " ".join(prompt.casefold().split())
