"""Answers what the Trainers wait for: evaluations, rollouts, the record of a step, joint checkpoints."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lightning_mappa.errors import DataError, InfrastructureError
from lightning_mappa.metrics import score_metrics
from lightning_mappa.producer import Produced, Producer
from lightning_mappa.record import RunRecord, evaluation_metrics
from lightning_mappa.rollout.coordinator import RolloutCoordinator
from lightning_mappa.rollout.plan import RolloutPlan
from lightning_mappa.rollout.task_order import step_tasks
from lightning_mappa.run_folder import RunFolder
from lightning_mappa.runtime.board import DRIVER, Board, Job
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
    val_scored: bool
    checkpoint_every: int
    keep_checkpoints: int
    max_staleness: int


class Driver:
    """The loop of a run. Holds no tensors and knows no prompts.

    Rollout s samples with the weights of version s − max_staleness (the first ones with those of the start), and
    none begins before they are there. What is evaluated as version v are the weights of v: at staleness above 0
    the rollouts that need older ones are played first.
    """

    def __init__(
        self,
        *,
        settings: DriverSettings,
        board: Board,
        coordinator: RolloutCoordinator,
        train_tasks: Sequence[Task],
        selection_tasks: Sequence[Task],
        folder: RunFolder,
        record: RunRecord,
        stop: StopRequest,
    ) -> None:
        self._settings = settings
        self._board = board
        self._coordinator_state = coordinator.state()
        self._producer = Producer(coordinator)
        self._train_tasks = train_tasks
        self._selection_tasks = selection_tasks
        self._folder = folder
        self.record = record
        self.stop = stop
        self.stopped = False
        """Whether a stop request ended the run before its last step."""
        self._ahead: dict[int, Future[Produced]] = {}
        self._saving: Path | None = None
        self._updating_since: float | None = None
        board.on_failure = self._producer.drop

    def drive(self) -> None:
        """Works until every Trainer has left. Call it with the turn held."""
        with closing(self._producer):
            if self._board.first_step == 0:
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
        job = self._board.next_job()
        sync_s = self._board.weights.take_sync_s()
        if self._updating_since is not None:
            self.record.time("update", time.monotonic() - self._updating_since - sync_s)
            self._updating_since = None
        self.record.time("weight_sync", sync_s)
        return job

    def _evaluate(self, version: int) -> None:
        settings = self._settings
        plan = RolloutPlan(
            split="selection",
            step=version,
            tasks=self._selection_tasks,
            n_samples=settings.val_n_samples,
            temperature=settings.val_temperature,
            scored=settings.val_scored,
        )
        start = time.monotonic()
        with self.record.evaluating():
            produced = self._result(self._order(plan, version), f"the evaluation at version {version}")
        assert produced is not None
        sync_s = self._board.weights.take_sync_s()
        self.record.time("evaluation", time.monotonic() - start - sync_s)
        self.record.time("weight_sync", sync_s)
        self._check_versions(produced, version)
        episodes = produced.rollout.episodes
        metrics = {**evaluation_metrics(episodes), **(score_metrics(episodes) if settings.val_scored else {})}
        self.record.evaluation(version, episodes, metrics)
        self._board.post_evaluation(version, metrics)

    def _enter(self, version: int) -> None:
        """Between two steps: close the last one, and save or stop where due."""
        self._close_step()
        if self.stop.requested:
            self._stop(version)
            return
        if self._settings.max_staleness > 0:
            self._order_rollouts(version)
        due = version > 0 and version % self._settings.checkpoint_every == 0
        self._board.post_boundary(version, self._begin_saving(version) if due else None)

    def _stop(self, version: int) -> None:
        """Ends the run before step `version`, once it can go on from there."""
        self.stopped = True
        self._producer.drop()
        self._board.end(version - 1, self._begin_saving(version))

    def _begin_saving(self, version: int) -> Path | None:
        """None where that version is there already: just now, or from the run that this one resumes."""
        there = self._folder.checkpoint(version).exists()
        self._saving = None if there else self._folder.begin_checkpoint()
        return self._saving

    def _order_rollouts(self, version: int) -> None:
        """Orders those that sample with `version`: one, and at the start also the ones of the first steps."""
        newest = version + self._settings.max_staleness
        oldest = version if version == self._board.first_step else newest
        for step in range(oldest, min(newest + 1, self._board.max_steps)):
            self._ahead[step] = self._order(self._plan(step), version)

    def _plan(self, step: int) -> RolloutPlan:
        settings = self._settings
        tasks = step_tasks(self._train_tasks, seed=settings.seed, step=step, batch_size=settings.rollout_batch_size)
        return RolloutPlan(
            split="train",
            step=step,
            tasks=tasks,
            n_samples=settings.n_samples_per_prompt,
            temperature=settings.temperature,
            scored=True,
        )

    def _order(self, plan: RolloutPlan, version: int) -> Future[Produced]:
        return self._producer.order(plan, before=partial(self._board.weights.serve, version))

    def _roll_out(self, step: int) -> None:
        if self._settings.max_staleness == 0:
            self._order_rollouts(step)
        with self.stop.dropping(self._producer.drop):
            if self.stop.requested:
                self._producer.drop()
            produced = self._result(self._ahead.pop(step), f"the rollout of step {step}")
        if produced is None:
            self._stop(step)
            return
        self._check_versions(produced, max(self._board.first_step, step - self._settings.max_staleness))
        self._coordinator_state = produced.coordinator_state
        self.record.time("weight_sync", self._board.weights.take_sync_s())
        self.record.rollout(step, produced.rollout)
        if self._settings.max_staleness == 0:
            self._board.weights.rest()
        self._board.post_rollout(step, produced.rollout.episodes)
        self._updating_since = time.monotonic()

    def _result(self, future: Future[Produced], what: str) -> Produced | None:
        """None when a stop was asked for before the rollout was complete: the step never happened."""
        self._board.turns.await_result(DRIVER, future, what)
        try:
            return future.result()
        except CancelledError as error:
            self._board.raise_first_error()
            if not self.stop.requested:
                raise InfrastructureError(f"{what} was cancelled by nobody known") from error
            return None

    def _check_versions(self, produced: Produced, version: int) -> None:
        """Raises `DataError` when a trained agent was sampled with other weights than the schedule says."""
        for scored in produced.rollout.episodes:
            for action in scored.episode.actions:
                trained = action.owner in self._board.ledger.trained_agents
                if trained and action.response_ids and action.policy_version != version:
                    raise DataError(
                        f"episode {scored.episode.id}: {action.agent_id} answered with version "
                        f"{action.policy_version} where version {version} was due"
                    )

    def _close_step(self) -> None:
        ledger = self._board.ledger
        step = ledger.step
        if step is not None and step.number not in self.record.closed and step.reports:
            self.record.close_step(step, ledger.counts())

    def _publish(self, version: int) -> None:
        assert self._saving is not None
        state = {**self.record.state(), **self._coordinator_state}
        self._folder.publish_checkpoint(self._saving, version, state, self._settings.keep_checkpoints)
        self._saving = None
        self._board.post_published()
