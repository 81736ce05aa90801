"""What a source of tasks is, and how it judges answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Grade:
    """What code found an episode's hand-in to be worth."""

    outcome: float | None
    """0…1; None where it could not be determined."""
    answer: str | None = None
    """What was handed in, in a few words."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What was measured on it, by name."""
    fault: str = ""
    """Why it was refused, as one word of a fixed list; empty when it was not."""
    detail: str = ""
    """One line to the fault, for people."""


@runtime_checkable
class GradesText(Protocol):
    """A `TaskSource` whose verifier takes a while, or gives reasons. Then `answer` and `grade` are not asked."""

    def grade_text(self, task: Task, text: str) -> Grade:
        """Looks at the workflow's last text. Called once per episode, in a thread."""
        ...


@runtime_checkable
class HandsOutFiles(Protocol):
    """A `TaskSource` whose tasks come with files, and whose outcome is a file and not a text.

    Both are called once per episode, in a thread; several at a time for different episodes. `grade` is not asked.
    """

    def hand_out(self, task: Task, workspace: Path) -> None:
        """Copies the task's files into the empty `workspace`, before the first agent acts."""
        ...

    def grade_files(self, task: Task, workspace: Path) -> Grade:
        """Looks at what the workflow has left there; nothing that programs wrote is executed.

        Raises:
            InfrastructureError: it could not be graded, through no fault of the files.
        """
        ...
