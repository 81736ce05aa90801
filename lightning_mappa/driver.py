"""Answers what the Trainers wait for: evaluations, rollouts, the record of a step, joint checkpoints."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_mappa.errors import InfrastructureError
from lightning_mappa.record import RunRecord, evaluation_metrics
from lightning_mappa.rollout.coordinator import Rollout, RolloutCoordinator, RolloutPlan
from lightning_mappa.rollout.task_order import step_tasks
from lightning_mappa.run_folder import RunFolder
from lightning_mappa.runtime.local import Job, LocalRuntime
from lightning_mappa.stop import StopRequest
from lightning_mappa.types import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverSettings:
    seed: int
    rollout_batch_size: int
    n_samples_per_prompt: int
    temperature: float
    val_n_samples: int
    val_temperature: float
    checkpoint_every: int
    keep_checkpoints: int


class Driver:
    """The loop of a run. Holds no tensors and knows no prompts."""

    def __init__(
        self,
        *,
        settings: DriverSettings,
        runtime: LocalRuntime,
        coordinator: RolloutCoordinator,
        train_tasks: Sequence[Task],
        selection_tasks: Sequence[Task],
        folder: RunFolder,
        record: RunRecord,
        stop: StopRequest,
    ) -> None:
        self._settings = settings
        self._runtime = runtime
        self._coordinator = coordinator
        self._train_tasks = train_tasks
        self._selection_tasks = selection_tasks
        self._folder = folder
        self.record = record
        self.stop = stop
        self.stopped = False
        """Whether a stop request ended the run before its last step."""
        self._saving: Path | None = None
        self._updating_since: float | None = None

    def drive(self) -> None:
        """Works until every Trainer has left. Call it with the turn held (`LocalRuntime.run`)."""
        if self._runtime.first_step == 0:
            self._evaluate(0)
        while (job := self._next_job()) is not None:
            answer = {
                "evaluate": self._evaluate,
                "boundary": self._enter,
                "rollout": self._roll_out,
                "publish": self._publish,
            }[job.kind]
            answer(job.number)
        self._close_step()

    def _next_job(self) -> Job | None:
        job = self._runtime.next_job()
        if self._updating_since is not None:
            self.record.time("update", time.monotonic() - self._updating_since - self._runtime.sync_s)
            self.record.time("weight_sync", self._runtime.sync_s)
            self._updating_since, self._runtime.sync_s = None, 0.0
        return job

    def _evaluate(self, version: int) -> None:
        settings = self._settings
        plan = RolloutPlan(
            split="selection",
            step=version,
            tasks=self._selection_tasks,
            n_samples=settings.val_n_samples,
            temperature=settings.val_temperature,
            scored=False,
        )
        start = time.monotonic()
        rollout = asyncio.run(self._coordinator.collect(plan))
        self.record.time("evaluation", time.monotonic() - start)
        metrics = evaluation_metrics(rollout.episodes)
        self.record.evaluation(version, rollout.episodes, metrics)
        self._runtime.post_evaluation(version, metrics)

    def _enter(self, version: int) -> None:
        """Between two steps: close the last one, and save or stop where due."""
        self._close_step()
        if self.stop.requested:
            self._stop(version)
        else:
            due = version > 0 and version % self._settings.checkpoint_every == 0
            self._runtime.post_boundary(version, self._begin_saving(version) if due else None)

    def _stop(self, version: int) -> None:
        """Ends the run before step `version`, once it can go on from there."""
        self.stopped = True
        self._runtime.end(version - 1, self._begin_saving(version))

    def _begin_saving(self, version: int) -> Path | None:
        """None where that version is there already: just now, or from the run that this one resumes."""
        there = self._folder.checkpoint(version).exists()
        self._saving = None if there else self._folder.begin_checkpoint()
        return self._saving

    def _roll_out(self, step: int) -> None:
        settings = self._settings
        plan = RolloutPlan(
            split="train",
            step=step,
            tasks=step_tasks(
                self._train_tasks,
                seed=settings.seed,
                step=step,
                batch_size=settings.rollout_batch_size,
            ),
            n_samples=settings.n_samples_per_prompt,
            temperature=settings.temperature,
            scored=True,
        )
        rollout = self._collect_or_drop(plan)
        if rollout is None:
            self._stop(step)
            return
        self.record.rollout(step, rollout)
        self._runtime.post_rollout(step, rollout.episodes)
        self._updating_since = time.monotonic()

    def _collect_or_drop(self, plan: RolloutPlan) -> Rollout | None:
        """None when a stop was asked for before the rollout was complete: the step never happened."""

        async def collect() -> Rollout:
            loop, task = asyncio.get_running_loop(), asyncio.current_task()
            assert task is not None
            with self.stop.dropping(lambda: loop.call_soon_threadsafe(task.cancel)):
                if self.stop.requested:
                    raise asyncio.CancelledError
                return await self._coordinator.collect(plan)

        try:
            return asyncio.run(collect())
        except asyncio.CancelledError as error:
            if not self.stop.requested:
                raise InfrastructureError(f"the rollout of step {plan.step} was cancelled by nobody known") from error
            return None

    def _close_step(self) -> None:
        ledger = self._runtime.ledger
        step = ledger.step
        if step is not None and step.number not in self.record.closed and step.reports:
            self.record.close_step(step, ledger.counts())

    def _publish(self, version: int) -> None:
        assert self._saving is not None
        state = {**self.record.state(), **self._coordinator.state()}
        self._folder.publish_checkpoint(self._saving, version, state, self._settings.keep_checkpoints)
        self._saving = None
        self._runtime.post_published()
