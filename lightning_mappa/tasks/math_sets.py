"""Mathematics problems whose splits are sets of their own: trained on one, selected on another, reported on a third."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from lightning_mappa.errors import ConfigError
from lightning_mappa.tasks.base import Grade, Split
from lightning_mappa.tasks.free_form import FreeFormVerifier
from lightning_mappa.tasks.leaks import MAX_CONTAINMENT, refuse_leaks
from lightning_mappa.tasks.problem_formats import Problem
from lightning_mappa.tasks.problem_sets import ProblemSet, used_problems
from lightning_mappa.tasks.strata import draw
from lightning_mappa.tasks.verifiers import IntegerVerifier, Ruling, RulingStatus, Verifier
from lightning_mappa.types import Task

SPLITS: tuple[Split, ...] = get_args(Split)


class MathSets:
    """`tasks.base.TaskSource` over one problem set per split.

    No problem may be in two splits, by normalised text or by n-grams: the run stops and lists the pairs.

    Args:
        train, report: `problem_sets.ProblemFile`, `problem_sets.HubSet` or another `ProblemSet`.
        selection: the same; or a number, and so many problems are kept out of `train` for it.
        seed: of what is drawn from the sets. It does not follow the run's seed, so that seeds are compared on
            the same problems.
        verifier: None takes integers for AIME, AMC and GSM8K, and free forms where a split is of the format
            `math`; letters have to be asked for. One for all splits.
        max_containment: share of n-grams from which two problems count as one; None compares whole texts alone.
    """

    def __init__(
        self,
        train: ProblemSet,
        report: ProblemSet,
        selection: ProblemSet | int = 64,
        seed: int = 0,
        verifier: Verifier | None = None,
        max_containment: float | None = MAX_CONTAINMENT,
    ) -> None:
        if max_containment is not None and not 0 < max_containment <= 1:
            raise ConfigError(f"task.max_containment={max_containment}: allowed is more than 0 up to 1, or null")
        of_train = used_problems(train, seed=seed)
        if isinstance(selection, int):
            of_train, of_selection = _apart(of_train, selection, seed)
            selection_set = train
        else:
            of_selection, selection_set = used_problems(selection, seed=seed), selection
        sets: dict[Split, ProblemSet] = {"train": train, "selection": selection_set, "report": report}
        problems = {"train": of_train, "selection": of_selection, "report": used_problems(report, seed=seed)}
        self._verifier = verifier or _verifier([source.format for source in sets.values()])
        self._tasks: dict[Split, tuple[Task, ...]] = {
            split: tuple(self._task(sets[split], problem) for problem in problems[split]) for split in SPLITS
        }
        refuse_leaks(
            {split: [(task.id, task.prompt) for task in self._tasks[split]] for split in SPLITS},
            max_containment=max_containment,
        )
        _refuse_equal_ids(self._tasks)

    def tasks(self, split: Split) -> Sequence[Task]:
        return self._tasks[split]

    def answer(self, text: str) -> str | None:
        return self._verifier.answer(text)

    def grade(self, task: Task, answer: str | None) -> float | None:
        return self._rule(task, answer).value

    def grade_text(self, task: Task, text: str) -> Grade:
        """`answer` and `grade` at once, with the reason where the answer is not simply right or wrong."""
        answer = self._verifier.answer(text)
        ruling = self._rule(task, answer)
        plain = ruling.status in (RulingStatus.RIGHT, RulingStatus.WRONG)
        return Grade(
            outcome=ruling.value,
            answer=answer,
            fault="" if plain else ruling.status.value,
            detail=ruling.detail,
        )

    def _rule(self, task: Task, answer: str | None) -> Ruling:
        if task.reference is None:
            return Ruling(status=RulingStatus.NO_REFERENCE)
        return self._verifier.grade(answer, task.reference)

    def close(self) -> None:
        """Ends the verifier's process, if it has one."""
        close = getattr(self._verifier, "close", None)
        if close is not None:
            close()

    def _task(self, source: ProblemSet, problem: Problem) -> Task:
        try:
            reference = self._verifier.reference(problem.answer)
        except ValueError as error:
            raise ConfigError(
                f"task: the answer of {source.name}, {problem.id}: {error}; set task.verifier for another form"
            ) from error
        return Task(
            id=f"{source.name}-{problem.id}",
            kind=problem.kind,
            prompt=problem.prompt,
            reference=reference,
            metadata={"stratum": problem.stratum},
        )


def _apart(problems: list[Problem], count: int, seed: int) -> tuple[list[Problem], list[Problem]]:
    """What is left for training, and `count` problems for selection."""
    if not 1 <= count < len(problems):
        raise ConfigError(f"task.selection={count}: allowed is 1 to {len(problems) - 1}, of the training problems")
    kept = set(draw([problem.stratum for problem in problems], count, seed=seed))
    rest = [problem for index, problem in enumerate(problems) if index not in kept]
    return rest, [problems[index] for index in sorted(kept)]


def _verifier(formats: Sequence[str]) -> Verifier:
    return FreeFormVerifier() if "math" in formats else IntegerVerifier()


def _refuse_equal_ids(tasks: dict[Split, tuple[Task, ...]]) -> None:
    """Two sets of one name whose rows carry the same ids: figures by problem would mix them up."""
    seen: dict[str, Split] = {}
    for split, of_split in tasks.items():
        for task in of_split:
            if task.id in seen:
                raise ConfigError(f"task: the id {task.id} is in {seen[task.id]} and in {split}; rename one file")
            seen[task.id] = split
