"""Plays the episodes of a rollout batch side by side, and has their actions scored off the critical path."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from pathlib import Path
from typing import Any

from lightning_mappa.coaches.base import (
    Coach,
    coach_snapshot,
    coach_state,
    end_batch,
    halt_coach,
    load_coach_state,
    needs_outcome,
    until,
)
from lightning_mappa.coaches.verdict import is_cancelled, verdict_of
from lightning_mappa.coaches.watch import MissingWatch
from lightning_mappa.errors import CoachError, EngineLost, InfrastructureError, MappaError
from lightning_mappa.rollout.engine import Engine, Session
from lightning_mappa.rollout.plan import Playing, Rollout, RolloutPlan, SeatContext, SeatFactory
from lightning_mappa.tasks.base import Grade, GradesText, HandsOutFiles, TaskSource
from lightning_mappa.types import Action, Episode, EpisodeStatus, ScoredEpisode, Task, ToolStatus, Verdict
from lightning_mappa.workflows.base import Workflow, last_agent_id

UNSCORED = Verdict(score=None, reason="actions are not scored here", coach="none")


class RolloutCoordinator:
    """Owns the episodes in flight.

    Args:
        workspaces: makes the private folder of one episode, removed when the context ends.
        max_episodes_in_flight: episodes are played in windows of this many, so that which requests share a
            decoding wave does not depend on timing.
        deadline_s: an episode that takes longer is cut and fails with that reason; a verdict that does is missing.
        missing: ends the run where too many verdicts are; None lets any number pass.
    """

    def __init__(
        self,
        *,
        workflow: Workflow,
        source: TaskSource,
        engine: Engine,
        coach: Coach,
        seat_for: SeatFactory,
        workspaces: Callable[[str], AbstractContextManager[Path]],
        max_episodes_in_flight: int,
        deadline_s: float,
        missing: MissingWatch | None = None,
    ) -> None:
        self._workflow = workflow
        self._last_agent_id = last_agent_id(workflow)
        self._source = source
        self._engine = engine
        self._coach = coach
        self._seat_for = seat_for
        self._workspaces = workspaces
        self._window = max_episodes_in_flight
        self._deadline_s = deadline_s
        self._missing_watch = missing

    def state(self) -> dict[str, Any]:
        """What a resumed run needs; tasks and seeds are functions of the step."""
        return {"coach": coach_state(self._coach)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        load_coach_state(self._coach, state["coach"])

    async def collect(self, plan: RolloutPlan) -> Rollout:
        """Plays and scores every episode of the plan.

        Raises `InfrastructureError` when all of them failed; fewer are data.
        """
        return await self.scored(await self.play(plan))

    async def play(self, plan: RolloutPlan) -> Playing:
        """Returns when the last episode has ended, with verdicts still under way."""
        start = time.monotonic()
        coach_before = coach_snapshot(self._coach)
        jobs = []
        played: Counter[str] = Counter()
        for index, task in enumerate(plan.tasks):
            # A task that comes up again in a step goes on counting: seeds are of task and sample.
            before = played[task.id]
            played[task.id] += plan.n_samples
            jobs += [(plan.episode_id(index, i), task, before + i) for i in range(plan.n_samples)]
        scoring: list[asyncio.Task[ScoredEpisode]] = []
        for first in range(0, len(jobs), self._window):
            await self._play_window(plan, jobs[first : first + self._window], scoring)
        return Playing(plan=plan, scoring=scoring, rollout_s=time.monotonic() - start, coach_before=coach_before)

    async def scored(self, playing: Playing) -> Rollout:
        """Waits for the last verdict. On the loop that played; to be called in the order of the steps.

        Raises `InfrastructureError` when all episodes failed.
        """
        start = time.monotonic()
        try:
            episodes = tuple(await asyncio.gather(*playing.scoring))
        except BaseException:
            await playing.cancel()
            raise
        if playing.plan.scored and playing.plan.trained_on:
            end_batch(self._coach)
        elif playing.plan.scored:
            load_coach_state(self._coach, playing.coach_before)
        self._refuse_total_failure(playing.plan, episodes)
        return Rollout(episodes=episodes, rollout_s=playing.rollout_s, coach_s=time.monotonic() - start)

    async def _play_window(
        self,
        plan: RolloutPlan,
        jobs: Sequence[tuple[str, Task, int]],
        scoring: list[asyncio.Task[ScoredEpisode]],
    ) -> None:
        # Every session is open before the first episode starts, so that the first wave holds them all.
        lines = [self._engine.session(episode_id) for episode_id, _, _ in jobs]
        sessions = [await line.__aenter__() for line in lines]
        verdicts: list[dict[int, asyncio.Task[Verdict]]] = [{} for _ in jobs]
        playing = [
            asyncio.create_task(self._play(plan, job, line, session, started))
            for job, line, session, started in zip(jobs, lines, sessions, verdicts, strict=True)
        ]
        scoring.extend(
            asyncio.create_task(self._score(task, plan.scored, started))
            for task, started in zip(playing, verdicts, strict=True)
        )
        try:
            await asyncio.gather(*playing)
        except BaseException:
            for task in (*playing, *scoring):
                task.cancel()
            await asyncio.gather(*playing, *scoring, return_exceptions=True)
            raise

    async def _play(
        self,
        plan: RolloutPlan,
        job: tuple[str, Task, int],
        line: AbstractAsyncContextManager[Session],
        session: Session,
        verdicts: dict[int, asyncio.Task[Verdict]],
    ) -> Episode:
        """Starts the verdicts that need not wait for the episode's end, by the index of their action."""
        episode_id, task, sample = job

        def judge() -> None:
            index = len(actions) - 1
            if plan.scored and not needs_outcome(self._coach, actions[index], self._last_agent_id):
                episode = Episode(
                    id=episode_id, task=task, actions=tuple(actions), sample=sample, last_agent_id=self._last_agent_id
                )
                verdicts[index] = asyncio.create_task(self._verdict(until(episode, index), index))

        actions = _Actions(judge)
        status, reason, grade = EpisodeStatus.OK, "", Grade(outcome=None)
        try:
            with self._workspaces(episode_id) as workspace:
                if isinstance(self._source, HandsOutFiles):
                    await asyncio.to_thread(self._source.hand_out, task, workspace)
                context = SeatContext(
                    plan=plan,
                    task=task,
                    sample=sample,
                    episode_id=episode_id,
                    session=session,
                    workspace=workspace,
                    actions=actions,
                )
                seats = {agent: self._seat_for(agent, context) for agent in self._workflow.agent_ids}
                async with asyncio.timeout(self._deadline_s):
                    text = await self._workflow.run(task, seats)
                grade = await self._grade(task, text, workspace, actions)
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            status, reason = EpisodeStatus.FAILED, "the workflow cancelled itself"
        except MappaError as error:
            if not isinstance(error, InfrastructureError) or isinstance(error, EngineLost):
                raise
            status, reason = EpisodeStatus.FAILED, str(error)
        except Exception as error:
            status, reason = EpisodeStatus.FAILED, f"{type(error).__name__}: {error}"
        finally:
            await line.__aexit__(None, None, None)
        return Episode(
            id=episode_id,
            task=task,
            actions=tuple(actions),
            status=status,
            reason=reason or grade.detail,
            answer=grade.answer,
            outcome=grade.outcome,
            metrics=grade.metrics,
            fault=grade.fault,
            sample=sample,
            last_agent_id=self._last_agent_id,
        )

    async def _grade(self, task: Task, text: str, workspace: Path, actions: Sequence[Action]) -> Grade:
        if isinstance(self._source, HandsOutFiles):
            if broken := _with_broken_sandbox(actions):
                # Right or wrong, what lies there is not what the team would have handed in.
                return Grade(outcome=None, detail=f"not graded: the sandbox failed for {broken.agent_id}")
            return await asyncio.to_thread(self._source.grade_files, task, workspace)
        if isinstance(self._source, GradesText):
            return await asyncio.to_thread(self._source.grade_text, task, text)
        answer = self._source.answer(text)
        return Grade(outcome=self._source.grade(task, answer), answer=answer)

    async def _score(
        self, playing: asyncio.Task[Episode], scored: bool, verdicts: dict[int, asyncio.Task[Verdict]]
    ) -> ScoredEpisode:
        """`verdicts` are those under way, by the index of their action."""
        try:
            episode = await playing
            if not scored:
                return ScoredEpisode(episode=episode, verdicts=(UNSCORED,) * len(episode.actions))
            for index in range(len(episode.actions)):
                if index not in verdicts:
                    verdicts[index] = asyncio.create_task(self._verdict(episode, index))
            given = await asyncio.gather(*(verdicts[index] for index in range(len(episode.actions))))
            return ScoredEpisode(episode=episode, verdicts=tuple(given))
        except BaseException:
            for verdict in verdicts.values():
                verdict.cancel()
            await asyncio.gather(*verdicts.values(), return_exceptions=True)
            raise

    async def _verdict(self, episode: Episode, index: int) -> Verdict:
        """When it ends the run, calls in flight are booked first: they are paid for."""
        try:
            verdict = await verdict_of(self._coach, episode, index, self._deadline_s)
            # Of what was cut short there may be nothing to judge, and not every coach can say so.
            if self._missing_watch is not None and episode.status is not EpisodeStatus.FAILED:
                self._missing_watch.see(episode.actions[index], verdict)
            return verdict
        except CoachError as error:
            await halt_coach(self._coach, str(error))
            raise

    @staticmethod
    def _refuse_total_failure(plan: RolloutPlan, episodes: Sequence[ScoredEpisode]) -> None:
        failed = [scored.episode for scored in episodes if scored.episode.status is EpisodeStatus.FAILED]
        if failed and len(failed) == len(episodes):
            raise InfrastructureError(
                f"all {len(failed)} episodes of {plan.split} step {plan.step} failed; the first: {failed[0].reason}"
            )


class _Actions(list[Action]):
    """Tells of every action, which has run its tools when it is appended."""

    def __init__(self, tell: Callable[[], None]) -> None:
        super().__init__()
        self._tell = tell

    def append(self, action: Action) -> None:
        super().append(action)
        self._tell()


def _with_broken_sandbox(actions: Sequence[Action]) -> Action | None:
    """The first action of which a program did not get to run; its seat has tried twice."""
    return next(
        (a for a in actions if any(result.status is ToolStatus.SANDBOX_ERROR for result in a.tool_results)), None
    )
