"""The coach is off the critical path: when verdicts start, and what is left of them when a batch closes."""

from __future__ import annotations

import asyncio
import selectors

import pytest

from benchmarks.coach_overlap import MEAN_S, SEEDS, SimulatedCoach, StreamingEngine, measure
from lightning_mappa.errors import CoachError
from lightning_mappa.types import EpisodeStatus, Verdict
from tests.unit.rollout.test_coordinator import OneAgent, collect, make, plan


class _Skipping(selectors.DefaultSelector):
    """Waits no real time: the loop's clock jumps to its next timer."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.now += timeout or 0.0
        return super().select(0)


class SimulatedLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._skipping = _Skipping()
        super().__init__(self._skipping)

    def time(self) -> float:
        return self._skipping.now


def simulated(main):
    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        return runner.run(main)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("ratio", [0.25, 1.0, 3.0])
def test_verdicts_cost_little_more_than_the_longer_of_rollout_and_calls(seed, ratio):
    measured = measure(StreamingEngine, ratio * MEAN_S, seed, simulated)
    assert measured.calls >= 3 * 32
    assert max(measured.early, measured.last) <= 1.15 * measured.bound
    assert max(measured.early, measured.last) < measured.at_end < measured.awaited
    if ratio == 1.0:
        assert measured.awaited >= 1.4 * measured.last
    if ratio == 3.0:  # Only the last action's verdict is left.
        assert measured.last <= measured.alone + measured.slowest_call


class TwoActions(OneAgent):
    async def run(self, task, agents):
        await agents["a"].act(task, ())
        await asyncio.sleep(0.01)
        return (await agents["a"].act(task, ())).text


class Watching:
    """Keeps what it was shown."""

    name = "watching"

    def __init__(self, needs_outcome):
        if needs_outcome is not None:
            self.needs_outcome = needs_outcome
        self.shown = []

    async def score(self, episode, index):
        self.shown.append((len(episode.actions), index, episode.outcome))
        assert (episode.status is EpisodeStatus.RUNNING) == (self.__dict__.get("needs_outcome") is False)
        return Verdict(score=float(index), reason="", coach=self.name)


@pytest.mark.parametrize(
    ("needs_outcome", "shown"),
    [
        (False, [(1, 0, None), (2, 1, None)]),
        (True, [(2, 0, 1.0), (2, 1, 1.0)]),
        (None, [(2, 0, 1.0), (2, 1, 1.0)]),
    ],
)
def test_a_coach_that_needs_no_outcome_is_asked_when_the_action_is_done(needs_outcome, shown):
    coach = Watching(needs_outcome)
    rollout = collect(make(TwoActions(), coach), n_samples=1)
    assert sorted(coach.shown) == sorted(shown * 4)
    assert [[verdict.score for verdict in scored.verdicts] for scored in rollout.episodes] == [[0.0, 1.0]] * 4


class LastWaits:
    """Waits for the outcome with the last agent's actions."""

    name = "last waits"

    def __init__(self):
        self.shown = []

    def needs_outcome_of(self, action, last_agent_id):
        return last_agent_id in (None, action.agent_id)

    async def score(self, episode, index):
        agent_id = episode.actions[index].agent_id
        self.shown.append((agent_id, index, len(episode.actions), episode.status, episode.outcome))
        return Verdict(score=float(index), reason="", coach=self.name)


class LastSaysTwoThings:
    agent_ids = ("a", "b")

    async def run(self, task, agents):
        await agents["b"].act(task, ())
        await agents["a"].act(task, ())
        return (await agents["b"].act(task, ())).text


@pytest.mark.parametrize("known", [True, False])
def test_only_the_last_agents_actions_wait_for_the_outcome(known):
    coach, workflow = LastWaits(), LastSaysTwoThings()
    if known:
        workflow.last_agent_id = "b"
    rollout = collect(make(workflow, coach), n_samples=1)
    early = ("a", 1, 2, EpisodeStatus.RUNNING, None) if known else ("a", 1, 3, EpisodeStatus.OK, 1.0)
    waited = [("b", index, 3, EpisodeStatus.OK, 1.0) for index in (0, 2)]
    assert sorted(coach.shown) == sorted([early, *waited] * 4)
    assert [[verdict.score for verdict in scored.verdicts] for scored in rollout.episodes] == [[0.0, 1.0, 2.0]] * 4


def test_an_episode_that_fails_keeps_the_verdicts_it_has():
    class Fails(TwoActions):
        async def run(self, task, agents):
            await super().run(task, agents)
            if task.id == "t1":
                raise RuntimeError("no power")
            return task.reference

    rollout = collect(make(Fails(), Watching(False)), n_samples=1)
    (failed,) = [scored for scored in rollout.episodes if scored.episode.status is EpisodeStatus.FAILED]
    assert [verdict.score for verdict in failed.verdicts] == [0.0, 1.0]


def test_evaluations_start_no_verdicts():
    coach = Watching(False)
    collect(make(TwoActions(), coach), scored=False)
    assert coach.shown == []


@pytest.mark.parametrize("error", [CoachError("budget spent"), None])
def test_no_early_verdict_outlives_its_rollout(error):
    class Stuck(SimulatedCoach):
        async def score(self, episode, index):
            if error is not None and index == 1:
                raise error
            await asyncio.sleep(60)

    async def scene() -> int:
        playing = asyncio.create_task(make(TwoActions(), Stuck(0, show_reference="none")).collect(plan()))
        await asyncio.sleep(0.1)
        playing.cancel()
        with pytest.raises((asyncio.CancelledError, CoachError)):
            await playing
        return len(asyncio.all_tasks()) - 1

    assert asyncio.run(scene()) == 0
