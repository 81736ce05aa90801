"""`runtime=local`: coordinator, engine and Trainers as threads of one process that take turns."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torch import Tensor

from lightning_mappa.algorithm.advantages import ActionCredit, ActionStats
from lightning_mappa.errors import RunEnded
from lightning_mappa.rollout.engine import Engine
from lightning_mappa.rollout.fingerprint import Fingerprint, check_fingerprints
from lightning_mappa.rollout.ledger import Ledger
from lightning_mappa.runtime.turn import Turn
from lightning_mappa.types import ActionKey, Experience, ScoredEpisode

DRIVER = "the driver"
"""With a space: an agent may well be called `driver`."""
JOIN_S = 60.0
M_ARENA_MAX = -8
"""As malloc.h of glibc names it."""
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

    def __str__(self) -> str:
        names = {
            "evaluate": "the evaluation at version",
            "boundary": "the boundary before step",
            "rollout": "the rollout of step",
            "publish": "the joint checkpoint of version",
        }
        return f"{names[self.kind]} {self.number}"


class LocalRuntime:
    """Runs one Trainer thread per trained agent and tells the driver what they wait for.

    Everything below is called with the turn held, so there is no lock beside the turn's own.

    Args:
        tolerances: by trained agent, see `check_fingerprints`.
    """

    def __init__(
        self,
        ledger: Ledger,
        engine: Engine,
        *,
        tolerances: Mapping[str, float],
        first_step: int,
        max_steps: int,
        deadline_s: float,
    ) -> None:
        self.ledger = ledger
        self.engine = engine
        self.tolerances = tolerances
        self.first_step = first_step
        self.max_steps = max_steps
        self.sync_s = 0.0
        """Seconds spent in weight sync since the driver last reset it."""
        self.evaluations: dict[int, Mapping[str, float]] = {}
        """Of the selection split, by policy version."""
        self._turn = Turn((DRIVER, *ledger.trained_agents), deadline_s)
        self._wants: dict[str, Job] = {}
        self._boundary = first_step - 1
        self._checkpoint_folder: Path | None = None
        self._checkpoint_version = first_step
        self._saved: set[str] = set()
        self._published = True
        self._last_step: int | None = None
        self._errors: dict[str, BaseException] = {}

    # -- the driver's side ------------------------------------------------------------------------------

    def run(self, trainers: Mapping[str, Callable[[LocalLink], None]], drive: Callable[[], None]) -> None:
        """Starts the Trainer threads, drives them in this thread, and joins them.

        Raises the first error of the driver or of a Trainer.
        """
        share_one_heap()
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
                self.fail(DRIVER, error)
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
            self.fail(agent_id, error)

    def ask(self, agent_id: str, job: Job) -> None:
        """Waits until the driver has done `job`. Raises `RunEnded` when the run breaks off before."""
        self._wants[agent_id] = job
        try:
            self.wait(agent_id, lambda: self._done(job), str(job))
        finally:
            del self._wants[agent_id]

    def wait(self, agent_id: str, met: Callable[[], bool], what: str) -> None:
        """Waits for `met`. Raises `RunEnded` when the run breaks off before."""
        self._turn.wait(agent_id, lambda: met() or bool(self._errors), what)
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
        """Breaks the run off: every wait ends, and `run` raises the first error."""
        self._errors.setdefault(name, error)


def share_one_heap() -> None:
    """Lets the Trainer threads allocate from one heap, where the C library is one that can.

    glibc gives every thread a heap of its own and keeps there what the thread has freed. The Trainers never run
    at the same time, so each would hold on to the activations of its last update while another one works.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_ARENA_MAX, 1)


class LocalLink:
    """One agent's line to a `LocalRuntime`; see `runtime.base.AgentLink`."""

    def __init__(self, runtime: LocalRuntime, agent_id: str) -> None:
        self._runtime = runtime
        self.agent_id = agent_id
        self.first_step = runtime.first_step
        self.max_steps = runtime.max_steps

    def checkpoint_path(self, version: int) -> Path | None:
        self._runtime.ask(self.agent_id, Job("boundary", version))
        return self._runtime.checkpoint_part(self.agent_id)

    def checkpoint_saved(self, version: int) -> None:
        self._runtime.part_saved(self.agent_id)
        self._runtime.ask(self.agent_id, Job("publish", version))

    def experience(self, step: int) -> Sequence[Experience]:
        self._runtime.ask(self.agent_id, Job("rollout", step))
        if not self._runtime.is_open(step):
            raise RunEnded(f"the run ended before step {step}")
        return self._runtime.ledger.experiences(step, self.agent_id)

    def exchange(
        self, step: int, stats: Mapping[ActionKey, ActionStats], kl_coef: float
    ) -> Mapping[ActionKey, ActionCredit]:
        ledger = self._runtime.ledger
        ledger.post(step, self.agent_id, stats, kl_coef)
        self._runtime.wait(self.agent_id, ledger.posted, f"the credit of step {step}")
        return ledger.credits_of(step, self.agent_id)

    def report(self, step: int, metrics: Mapping[str, float]) -> None:
        self._runtime.ledger.report(step, self.agent_id, metrics)

    def push_weights(self, version: int, tensors: Iterable[tuple[str, Tensor]], fingerprint: Fingerprint) -> None:
        run = self._runtime
        start = time.monotonic()
        run.engine.update_weights(self.agent_id, version, dict(tensors))
        served = run.engine.fingerprints(self.agent_id, fingerprint.prompt_ids, fingerprint.token_ids)
        check_fingerprints(self.agent_id, version, fingerprint, served, run.tolerances[self.agent_id])
        run.ledger.record_sync(self.agent_id, version)
        run.sync_s += time.monotonic() - start

    def evaluation(self, version: int) -> Mapping[str, float]:
        self._runtime.ask(self.agent_id, Job("evaluate", version))
        return self._runtime.evaluations[version]

    def leave(self, error: BaseException | None = None) -> None:
        run = self._runtime
        if error is not None and not isinstance(error, RunEnded):
            run.fail(self.agent_id, error)
        run.ledger.leave(self.agent_id)
        step = run.ledger.step
        run.end(-1 if step is None else step.number)
