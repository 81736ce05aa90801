"""Workflows and coaches that do what they should not: the episode or the verdict is lost, the run is not."""

from __future__ import annotations

import asyncio
import math

import pytest

from lightning_mappa.testing import ScriptedCoach
from lightning_mappa.types import EpisodeStatus
from tests.unit.rollout.test_coordinator import TASKS, OneAgent, OneCall, collect, make


async def wait_for_a_cancelled_task() -> None:
    task = asyncio.create_task(asyncio.sleep(60))
    task.cancel()
    await task


def test_a_workflow_that_cancels_itself_is_a_failed_episode_and_not_the_end_of_the_run():
    class CancelsItself(OneAgent):
        async def run(self, task, agents):
            text = await super().run(task, agents)
            if task.id == "t1":
                await wait_for_a_cancelled_task()
            return text

    episodes = [scored.episode for scored in collect(make(CancelsItself()), n_samples=1).episodes]
    assert [episode.status for episode in episodes].count(EpisodeStatus.FAILED) == 1
    assert episodes[1].reason == "the workflow cancelled itself"
    assert len(episodes[1].actions) == 1


async def hang() -> float:
    await asyncio.sleep(60)
    return 5.0


async def cancel() -> float:
    await wait_for_a_cancelled_task()
    return 5.0


async def give(score: float) -> float:
    return score


@pytest.mark.parametrize(
    ("misbehave", "reason"),
    [
        (hang, "no verdict in 0.3 s"),
        (cancel, "cancelled itself"),
        (lambda: give(math.nan), "nan"),
        (lambda: give(70.0), "70"),
        (lambda: give(-0.5), "-0.5"),
    ],
)
def test_a_coach_that_gives_no_score_of_0_to_10_in_time_leaves_a_missing_verdict(misbehave, reason):
    class Wayward(ScriptedCoach):
        async def score(self, episode, index):
            if episode.task.id == "t2":
                score = await misbehave()
                return await ScriptedCoach(lambda e, i: score).score(episode, index)
            return await super().score(episode, index)

    coordinator = make(coach=Wayward(lambda e, i: 10.0), deadline_s=0.3)
    verdicts = [scored.verdicts[0] for scored in collect(coordinator, n_samples=1).episodes]
    assert [verdict.score for verdict in verdicts] == [10.0, 10.0, None, 10.0]
    assert reason in verdicts[2].reason


def test_a_task_that_comes_up_twice_in_a_step_is_sampled_anew():
    seen = []

    def seat(agent_id, context):
        seen.append((context.task.id, context.sample))
        return OneCall(agent_id, context)

    collect(make(seat_for=seat), tasks=[*TASKS[:2], TASKS[0]], n_samples=2)
    assert len(set(seen)) == len(seen) == 6
    assert seen[:2] == [("t0", 0), ("t0", 1)]
