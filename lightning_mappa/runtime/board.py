"""What every Trainer waits for and what the driver has answered: the state of a run that its parts share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from lightning_mappa.errors import RunEnded
from lightning_mappa.rollout.ledger import Ledger
from lightning_mappa.runtime.served_weights import ServedWeights
from lightning_mappa.types import ScoredEpisode

DRIVER = "the driver"
"""With a space: an agent may well be called `driver`."""
JobKind = Literal["evaluate", "boundary", "rollout", "publish"]


class Turns(Protocol):
    """Who may touch the state, and how one waits for a change of it. No wait is without a deadline."""

    def taken_by(self, name: str) -> AbstractContextManager[None]:
        """Inside, `name` is the only one at work, except while it waits."""
        ...

    def wait(self, name: str, condition: Callable[[], bool], what: str) -> None:
        """Lets others work until `condition` holds. Raises `InfrastructureError` after the deadline."""
        ...

    def await_result(self, name: str, future: Future[Any], what: str) -> None:
        """Waits for work that goes on outside of the run's parts."""
        ...


@dataclass(frozen=True, slots=True)
class Job:
    """What the Trainers need from the driver before they can go on.

    `evaluate`: the system at version `number`. `boundary`: step `number` − 1 is done; decide whether to
    save and whether to stop. `rollout`: the episodes of step `number`. `publish`: every agent's checkpoint
    part of version `number` is written.
    """

    kind: JobKind
    number: int

    def __str__(self) -> str:
        names = {
            "evaluate": "the evaluation at version",
            "boundary": "the boundary before step",
            "rollout": "the rollout of step",
            "publish": "the joint checkpoint of version",
        }
        return f"{names[self.kind]} {self.number}"


class Board:
    """The state of a run. Everything below is called by whoever has the turn, so there is no other lock.

    Args:
        turns: how the run's parts take turns.
        weights: what the engine serves of the agents.
    """

    def __init__(
        self,
        ledger: Ledger,
        weights: ServedWeights,
        turns: Turns,
        *,
        first_step: int,
        max_steps: int,
    ) -> None:
        self.ledger = ledger
        self.weights = weights
        self.turns = turns
        self.first_step = first_step
        self.max_steps = max_steps
        self.evaluations: dict[int, Mapping[str, float]] = {}
        """Of the selection split, by policy version."""
        self.errors: dict[str, BaseException] = {}
        """By who failed, the first first."""
        self.on_failure: Callable[[], object] = lambda: None
        """Called with the first error: ends work that does not wait here."""
        self._wants: dict[str, Job] = {}
        self._boundary = first_step - 1
        self._checkpoint_folder: Path | None = None
        self._checkpoint_version = first_step
        self._saved: set[str] = set()
        self._published = True
        self._last_step: int | None = None

    # -- the driver's side ------------------------------------------------------------------------------

    def next_job(self) -> Job | None:
        """Waits until the Trainers need something; None when all have left or the run has broken off."""

        def over() -> bool:
            return not self.ledger.active or bool(self.errors)

        self.turns.wait(DRIVER, lambda: over() or self._pending() is not None, "the Trainers")
        return None if over() else self._pending()

    def post_evaluation(self, version: int, metrics: Mapping[str, float]) -> None:
        self.evaluations[version] = dict(metrics)

    def post_boundary(self, version: int, checkpoint_folder: Path | None) -> None:
        """Lets the agents into step `version`; with a folder, each saves its part there first."""
        self._boundary = version
        self._begin_saving(version, checkpoint_folder)

    def post_rollout(self, step: int, episodes: Sequence[ScoredEpisode]) -> None:
        self.ledger.open_step(step, episodes)

    def post_published(self) -> None:
        """The joint checkpoint is visible: whoever waits for it goes on."""
        self._published = True

    def end(self, last_step: int, checkpoint_folder: Path | None = None) -> None:
        """No step after `last_step`; with a folder, each agent still saves its part there."""
        self._last_step = last_step if self._last_step is None else min(last_step, self._last_step)
        if checkpoint_folder is not None:
            self._begin_saving(last_step + 1, checkpoint_folder)

    def _begin_saving(self, version: int, folder: Path | None) -> None:
        self._checkpoint_folder = folder
        self._checkpoint_version = version
        self._saved = set()
        self._published = folder is None

    def _pending(self) -> Job | None:
        # Of all agents and not only of those still there: one that broke off while saving left no whole part.
        if not self._published and self._saved.issuperset(self.ledger.trained_agents):
            return Job("publish", self._checkpoint_version)
        active = self.ledger.active
        wants = [self._wants.get(agent) for agent in active]
        for kind in ("evaluate", "boundary", "rollout"):
            numbers = {want.number for want in wants if want is not None and want.kind == kind}
            for number in sorted(numbers):
                job = Job(kind, number)
                everyone = kind == "evaluate" or all(want == job for want in wants)
                if everyone and self.ledger.synced(number) and not self._done(job):
                    return job
        return None

    def _done(self, job: Job) -> bool:
        """Whether the driver has answered, perhaps by ending the run before that step."""
        if job.kind == "evaluate":
            return job.number in self.evaluations
        if job.kind == "publish":
            return self._published
        over = self._last_step is not None and job.number > self._last_step
        return over or (self._boundary >= job.number if job.kind == "boundary" else self.is_open(job.number))

    # -- the Trainers' side -----------------------------------------------------------------------------

    def ask(self, agent_id: str, job: Job) -> None:
        """Waits until the driver has done `job`. Raises `RunEnded` when the run breaks off before."""
        self._wants[agent_id] = job
        try:
            self.wait(agent_id, lambda: self._done(job), str(job))
        finally:
            del self._wants[agent_id]

    def wait(self, agent_id: str, met: Callable[[], bool], what: str) -> None:
        """Waits for `met`. Raises `RunEnded` when the run breaks off before."""
        self.turns.wait(agent_id, lambda: met() or bool(self.errors), what)
        if not met():
            raise RunEnded(f"the run ended while {agent_id} waited for {what}")

    def is_open(self, step: int) -> bool:
        """Whether the ledger holds the episodes of `step`."""
        return self.ledger.step is not None and self.ledger.step.number == step

    def checkpoint_part(self, agent_id: str) -> Path | None:
        """The file that the agent still has to save; None when there is none."""
        if self._checkpoint_folder is None or agent_id in self._saved:
            return None
        return self._checkpoint_folder / f"{agent_id}.ckpt"

    def part_saved(self, agent_id: str) -> None:
        self._saved.add(agent_id)

    def fail(self, name: str, error: BaseException) -> None:
        """Breaks the run off: every wait ends, and the runtime raises the first error."""
        first = not self.errors
        self.errors.setdefault(name, error)
        if first:
            self.on_failure()

    def raise_first_error(self) -> None:
        first = next(iter(self.errors.values()), None)
        if first is not None:
            raise first
