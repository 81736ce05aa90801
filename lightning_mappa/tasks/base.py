"""What a source of tasks is, and how it judges answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from lightning_mappa.types import Task

Split = Literal["train", "selection", "report"]


class TaskSource(Protocol):
    """Tasks in three disjoint splits, the same for the same seed, and the verifier that goes with them."""

    def tasks(self, split: Split) -> Sequence[Task]:
        """All tasks of a split in a fixed order; ids are unique over all splits."""
        ...

    def answer(self, text: str) -> str | None:
        """The final answer in `text`, normalised; None when there is none."""
        ...

    def grade(self, task: Task, answer: str | None) -> float | None:
        """1.0 right, 0.0 wrong or absent; None when the task has no reference."""
        ...
