"""`runtime=local`: coordinator, engine and Trainers as threads of one process that take turns."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torch import Tensor

from lightning_mappa.algorithm.advantages import ActionCredit, ActionStats
from lightning_mappa.errors import RunEnded
from lightning_mappa.rollout.engine import Engine
from lightning_mappa.rollout.ledger import Ledger
from lightning_mappa.runtime.turn import Turn
from lightning_mappa.types import ActionKey, Experience, ScoredEpisode

DRIVER = "driver"
JOIN_S = 60.0
JobKind = Literal["evaluate", "boundary", "rollout", "publish"]


@dataclass(frozen=True, slots=True)
class Job:
    """What the Trainers need from the driver before they can go on.

    `evaluate`: the system at version `number`. `boundary`: step `number` − 1 is done; decide whether to
    save and whether to stop. `rollout`: the episodes of step `number`. `publish`: every agent's checkpoint
    part of version `number` is written.
    """

    kind: JobKind
    number: int


class LocalRuntime:
    """Runs one Trainer thread per trained agent and tells the driver what they wait for.

    Everything below is called with the turn held, so there is no lock beside the turn's own.
    """

    def __init__(self, ledger: Ledger, engine: Engine, *, first_step: int, max_steps: int, deadline_s: float):
        self.ledger = ledger
        self.engine = engine
        self.first_step = first_step
        self.max_steps = max_steps
        self.sync_s = 0.0
        """Seconds spent in weight sync since the driver last reset it."""
        self._turn = Turn((DRIVER, *ledger.trained_agents), deadline_s)
        self._wants: dict[str, Job] = {}
        self._evaluations: dict[int, Mapping[str, float]] = {}
        self._boundary = first_step - 1
        self._checkpoint_folder: Path | None = None
        self._saved: set[str] = set()
        self._published = True
        self._last_step: int | None = None
        self._errors: dict[str, BaseException] = {}

    # -- the driver's side ------------------------------------------------------------------------------

    def run(self, trainers: Mapping[str, Callable[[LocalLink], None]], drive: Callable[[], None]) -> None:
        """Starts the Trainer threads, drives them in this thread, and joins them.

        Raises the first error of the driver or of a Trainer.
        """
        threads = [
            threading.Thread(target=self._live, args=(agent, body), name=f"trainer-{agent}", daemon=True)
            for agent, body in trainers.items()
        ]
        for thread in threads:
            thread.start()
        with self._turn.taken_by(DRIVER):
            try:
                drive()
            except BaseException as error:
                self._errors.setdefault(DRIVER, error)
        for thread in threads:
            thread.join(timeout=JOIN_S)
        first = next(iter(self._errors.values()), None)
        if first is not None:
            raise first

    def next_job(self) -> Job | None:
        """Waits until the Trainers need something; None when all have left."""
        self._turn.wait(DRIVER, lambda: self._pending() is not None or not self.ledger.active, "the Trainers")
        return self._pending() if self.ledger.active else None

    def post_evaluation(self, version: int, metrics: Mapping[str, float]) -> None:
        self._evaluations[version] = dict(metrics)

    def post_boundary(self, version: int, checkpoint_folder: Path | None) -> None:
        """Lets the agents into step `version`; with a folder, each saves its part there first."""
        self._boundary = version
        self._begin_saving(checkpoint_folder)

    def post_rollout(self, step: int, episodes: Sequence[ScoredEpisode]) -> None:
        self.ledger.open_step(step, episodes)

    def posted_publish(self) -> None:
        self._published = True

    def end(self, last_step: int, checkpoint_folder: Path | None = None) -> None:
        """No step after `last_step`; with a folder, each agent still saves its part there."""
        self._last_step = last_step if self._last_step is None else min(last_step, self._last_step)
        if checkpoint_folder is not None:
            self._begin_saving(checkpoint_folder)

    @property
    def failed(self) -> bool:
        return bool(self._errors)

    def _begin_saving(self, folder: Path | None) -> None:
        self._checkpoint_folder = folder
        self._saved = set()
        self._published = folder is None

    def _pending(self) -> Job | None:
        active = self.ledger.active
        if not self._published and all(agent in self._saved for agent in active):
            return Job("publish", self._boundary)
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
        """Whether the driver has answered, though the agents have not had their turn yet."""
        if job.kind == "evaluate":
            return job.number in self._evaluations
        if job.kind == "boundary":
            return self._boundary >= job.number or self._over(job.number)
        return self._over(job.number) or (self.ledger.step is not None and self.ledger.step.number == job.number)

    # -- the Trainers' side -----------------------------------------------------------------------------

    def _live(self, agent_id: str, body: Callable[[LocalLink], None]) -> None:
        link = LocalLink(self, agent_id)
        try:
            with self._turn.taken_by(agent_id):
                try:
                    body(link)
                    link.leave()
                except BaseException as error:
                    link.leave(error)
        except BaseException as error:
            self._errors.setdefault(agent_id, error)

    def _wait_for(self, agent_id: str, job: Job | None, met: Callable[[], bool], what: str) -> None:
        """Waits for `met` or the end of the run; `job` is what the driver should do meanwhile."""
        if job is not None:
            self._wants[agent_id] = job
        self._turn.wait(agent_id, lambda: met() or self.failed, what)
        self._wants.pop(agent_id, None)
        if not met():
            raise RunEnded(f"the run ended while {agent_id} waited for {what}")

    def _over(self, step: int) -> bool:
        return self._last_step is not None and step > self._last_step


class LocalLink:
    """One agent's line to a `LocalRuntime`; see `runtime.base.AgentLink`."""

    def __init__(self, runtime: LocalRuntime, agent_id: str) -> None:
        self._runtime = runtime
        self.agent_id = agent_id
        self.first_step = runtime.first_step
        self.max_steps = runtime.max_steps

    def checkpoint_path(self, version: int) -> Path | None:
        run = self._runtime
        run._wait_for(
            self.agent_id,
            Job("boundary", version),
            lambda: run._boundary >= version or run._over(version),
            f"the boundary before step {version}",
        )
        if run._checkpoint_folder is None or self.agent_id in run._saved:
            return None
        return run._checkpoint_folder / f"{self.agent_id}.ckpt"

    def checkpoint_saved(self, version: int) -> None:
        run = self._runtime
        run._saved.add(self.agent_id)
        run._wait_for(self.agent_id, None, lambda: run._published, f"the joint checkpoint of version {version}")

    def experience(self, step: int) -> Sequence[Experience]:
        run = self._runtime

        def opened() -> bool:
            return run.ledger.step is not None and run.ledger.step.number == step

        run._wait_for(
            self.agent_id,
            Job("rollout", step),
            lambda: opened() or run._over(step),
            f"the rollout of step {step}",
        )
        if not opened():
            raise RunEnded(f"the run ended before step {step}")
        return run.ledger.experiences(step, self.agent_id)

    def exchange(
        self, step: int, stats: Mapping[ActionKey, ActionStats], kl_coef: float
    ) -> Mapping[ActionKey, ActionCredit]:
        run = self._runtime
        run.ledger.post(step, self.agent_id, stats, kl_coef)
        run._wait_for(self.agent_id, None, run.ledger.posted, f"the credit of step {step}")
        return run.ledger.credits_of(step, self.agent_id)

    def report(self, step: int, metrics: Mapping[str, float]) -> None:
        self._runtime.ledger.report(step, self.agent_id, metrics)

    def push_weights(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        run = self._runtime
        start = time.monotonic()
        run.engine.update_weights(self.agent_id, version, tensors)
        run.ledger.record_sync(self.agent_id, version)
        run.sync_s += time.monotonic() - start

    def evaluation(self, version: int) -> Mapping[str, float]:
        run = self._runtime
        run._wait_for(
            self.agent_id,
            Job("evaluate", version),
            lambda: version in run._evaluations,
            f"the evaluation at version {version}",
        )
        return run._evaluations[version]

    def leave(self, error: BaseException | None = None) -> None:
        run = self._runtime
        if error is not None and not isinstance(error, RunEnded):
            run._errors.setdefault(self.agent_id, error)
        run.ledger.leave(self.agent_id)
        step = run.ledger.step
        run.end(-1 if step is None else step.number)
