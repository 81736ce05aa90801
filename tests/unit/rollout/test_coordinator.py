"""Episodes side by side: order, windows, failures as data, scoring."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from lightning_mappa.errors import CoachError, ConfigError, InfrastructureError
from lightning_mappa.rollout.coordinator import RolloutCoordinator
from lightning_mappa.rollout.engine import GenerationRequest, SamplingParams
from lightning_mappa.rollout.plan import RolloutPlan
from lightning_mappa.rollout.task_order import step_tasks
from lightning_mappa.tasks.base import Grade
from lightning_mappa.testing import ScriptedCoach, ScriptedEngine, char_tokenizer
from lightning_mappa.types import EpisodeStatus, Task
from lightning_mappa.workflows.base import Message
from tests.unit.factories import make_action

TASKS = [Task(id=f"t{i}", kind="test", prompt=f"say {i}", reference=str(i)) for i in range(4)]


class Source:
    def tasks(self, split):
        return TASKS

    def answer(self, text):
        return text or None

    def grade(self, task, answer):
        return float(answer == task.reference)


@dataclass
class OneCall:
    """A seat that makes one call and records one action."""

    agent_id: str
    context: object
    role: str = "Tester"

    async def act(self, task, seen, **extra):
        context = self.context
        generation = await context.session.generate(
            GenerationRequest(
                agent_id=self.agent_id,
                prompt_ids=tuple(char_tokenizer().encode(task.prompt)),
                sampling=SamplingParams(max_new_tokens=8),
                seed=0,
            )
        )
        text = char_tokenizer().decode(list(generation.response_ids), skip_special_tokens=True)
        context.actions.append(
            make_action(
                episode_id=context.episode_id,
                index=len(context.actions),
                agent_id=self.agent_id,
                response_ids=generation.response_ids,
                rollout_log_probs=generation.log_probs,
                text=text,
            )
        )
        return Message(agent_id=self.agent_id, role=self.role, text=text)


class OneAgent:
    agent_ids = ("a",)

    async def run(self, task, agents):
        return (await agents["a"].act(task, ())).text


@contextmanager
def no_folder(episode_id: str) -> Iterator[Path]:
    yield Path("/nonexistent")


def make(workflow=None, coach=None, **overrides) -> RolloutCoordinator:
    engine = ScriptedEngine(lambda request, prompt: prompt.split()[-1], char_tokenizer())
    settings = {
        "workflow": workflow or OneAgent(),
        "source": Source(),
        "engine": engine,
        "coach": coach or ScriptedCoach(lambda episode, index: 5.0),
        "seat_for": lambda agent_id, context: OneCall(agent_id, context),
        "workspaces": no_folder,
        "max_episodes_in_flight": 3,
        "deadline_s": 5.0,
    }
    return RolloutCoordinator(**{**settings, **overrides})


def plan(**overrides) -> RolloutPlan:
    fields = {"split": "train", "step": 2, "tasks": TASKS, "n_samples": 2, "temperature": 1.0, "scored": True}
    return RolloutPlan(**{**fields, **overrides})


def collect(coordinator, **overrides):
    return asyncio.run(coordinator.collect(plan(**overrides)))


def test_episodes_come_in_the_order_of_the_plan_whatever_finishes_first():
    class SlowFirst(OneAgent):
        async def run(self, task, agents):
            await asyncio.sleep(0.02 * (4 - int(task.reference)))
            return await super().run(task, agents)

    rollout = collect(make(SlowFirst()))
    assert [(s.episode.task.id, s.episode.sample) for s in rollout.episodes] == [
        (task.id, sample) for task in TASKS for sample in (0, 1)
    ]
    assert all(s.episode.outcome == 1.0 and s.verdicts[0].score == 5.0 for s in rollout.episodes)


def test_a_failed_episode_is_data_with_its_reason_and_the_actions_so_far():
    class Fails(OneAgent):
        async def run(self, task, agents):
            text = await super().run(task, agents)
            if task.id == "t1":
                raise RuntimeError("no power")
            return text

    failed = [s for s in collect(make(Fails())).episodes if s.episode.status is EpisodeStatus.FAILED]
    assert [s.episode.task.id for s in failed] == ["t1", "t1"]
    assert failed[0].episode.reason == "RuntimeError: no power"
    assert failed[0].episode.outcome is None
    assert len(failed[0].episode.actions) == len(failed[0].verdicts) == 1


def test_an_episode_past_its_deadline_is_cut():
    class Hangs(OneAgent):
        async def run(self, task, agents):
            if task.id == "t0":
                await asyncio.sleep(60)
            return await super().run(task, agents)

    episodes = collect(make(Hangs(), deadline_s=0.2)).episodes
    assert [s.episode.status for s in episodes].count(EpisodeStatus.FAILED) == 2
    assert episodes[0].episode.reason.startswith("TimeoutError")


def test_when_every_episode_fails_the_run_stops_with_the_first_reason():
    class Broken(OneAgent):
        async def run(self, task, agents):
            raise InfrastructureError("the engine is gone")

    with pytest.raises(InfrastructureError, match="all 8 episodes of train step 2 failed; the first: the engine"):
        collect(make(Broken()))


@pytest.mark.parametrize("error", [ConfigError("bad prompt"), CoachError("budget spent")])
def test_errors_that_concern_the_whole_run_stop_it_as_they_are(error):
    class Raises(OneAgent):
        async def run(self, task, agents):
            raise error

    with pytest.raises(type(error), match=str(error)):
        collect(make(Raises()))


def test_a_coach_that_raises_leaves_a_missing_verdict_with_the_reason():
    def breaks(episode, index):
        if episode.task.id == "t2":
            raise KeyError("score")
        return 6.0

    verdicts = [s.verdicts[0] for s in collect(make(coach=ScriptedCoach(breaks))).episodes]
    assert [v.score for v in verdicts] == [6.0] * 4 + [None] * 2 + [6.0] * 2
    assert "KeyError" in verdicts[4].reason


def test_scoring_does_not_hold_up_the_episodes_that_still_run():
    order: list[str] = []

    class SlowCoach:
        name = "slow"

        async def score(self, episode, index):
            await asyncio.sleep(0.2)
            order.append(f"scored {episode.task.id}")
            return await ScriptedCoach(lambda e, i: 1.0).score(episode, index)

    class Notes(OneAgent):
        async def run(self, task, agents):
            text = await super().run(task, agents)
            order.append(f"played {task.id}")
            return text

    collect(make(Notes(), SlowCoach(), max_episodes_in_flight=1), n_samples=1)
    assert order[:4] == [f"played {task.id}" for task in TASKS]


def test_evaluations_are_not_scored():
    seen = []
    rollout = collect(make(coach=ScriptedCoach(lambda e, i: seen.append(1) or 1.0)), scored=False)
    assert not seen
    assert all(s.verdicts[0].score is None for s in rollout.episodes)


def test_cancelling_leaves_no_task_behind():
    class Hangs(OneAgent):
        async def run(self, task, agents):
            await asyncio.sleep(60)
            return ""

    async def cancelled() -> int:
        playing = asyncio.create_task(make(Hangs()).collect(plan()))
        await asyncio.sleep(0.05)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        return len(asyncio.all_tasks()) - 1

    assert asyncio.run(cancelled()) == 0


def test_task_order_is_a_function_of_seed_and_step_and_covers_every_pass():
    batches = [step_tasks(TASKS, seed=1, step=step, batch_size=3) for step in range(4)]
    assert batches == [step_tasks(TASKS, seed=1, step=step, batch_size=3) for step in range(4)]
    flat = [task.id for batch in batches for task in batch]
    for start in (0, 4, 8):
        assert sorted(flat[start : start + 4]) == ["t0", "t1", "t2", "t3"]
    others = [step_tasks(TASKS, seed=seed, step=0, batch_size=4) for seed in range(8)]
    assert len({tuple(task.id for task in batch) for batch in others}) > 1


@pytest.mark.parametrize(("scored", "ended_at"), [(True, [12]), (False, [])])
def test_a_batch_ends_once_when_all_its_verdicts_are_there(scored, ended_at):
    class Counting(ScriptedCoach):
        def __init__(self):
            super().__init__(lambda episode, index: 5.0)
            self.scored, self.ended_at = 0, []

        async def score(self, episode, index):
            await asyncio.sleep(0.001)
            self.scored += 1
            return await super().score(episode, index)

        def end_of_batch(self):
            self.ended_at.append(self.scored)

    coach = Counting()
    asyncio.run(make(coach=coach).collect(plan(n_samples=3, scored=scored)))
    assert coach.ended_at == ended_at


# -- tasks that come with files -------------------------------------------------------------------------------------


class FileSource(Source):
    """Hands out a file; the outcome is whether the agents left `out.txt` with its text."""

    def __init__(self, *, broken: bool = False) -> None:
        self.broken = broken

    def grade(self, task, answer):
        raise AssertionError("a text is not graded here")

    def hand_out(self, task, workspace):
        (workspace / "in.txt").write_text(task.prompt)

    def grade_files(self, task, workspace):
        if self.broken:
            raise InfrastructureError("the grading process died")
        if not (workspace / "out.txt").exists():
            return Grade(outcome=0.0, fault="missing", detail="no out.txt", metrics={"fair/x": 0.5})
        return Grade(outcome=1.0, answer=(workspace / "out.txt").read_text(), metrics={"x": 1.0})


@contextmanager
def real_folder(episode_id: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@dataclass
class Copies(OneCall):
    """Copies in.txt to out.txt, but not for task t1."""

    async def act(self, task, seen, **extra):
        message = await super().act(task, seen, **extra)
        workspace = self.context.workspace
        assert sorted(path.name for path in workspace.iterdir()) == ["in.txt"]
        if task.id != "t1":
            (workspace / "out.txt").write_text((workspace / "in.txt").read_text())
        return message


def test_files_are_handed_out_before_and_graded_after_the_workflow():
    coordinator = make(
        source=FileSource(), seat_for=lambda agent_id, context: Copies(agent_id, context), workspaces=real_folder
    )
    episodes = [scored.episode for scored in collect(coordinator, n_samples=1).episodes]
    assert {episode.status for episode in episodes} == {EpisodeStatus.OK}
    assert [(e.outcome, e.answer, e.metrics) for e in episodes] == [
        (0.0, None, {"fair/x": 0.5}) if e.task.id == "t1" else (1.0, e.task.prompt, {"x": 1.0}) for e in episodes
    ]
    assert [(e.fault, e.reason) for e in episodes if e.outcome == 0] == [("missing", "no out.txt")]
    assert all(not e.fault and not e.reason for e in episodes if e.outcome)


def test_a_grading_that_failed_is_no_outcome():
    coordinator = make(
        source=FileSource(broken=True),
        seat_for=lambda agent_id, context: Copies(agent_id, context),
        workspaces=real_folder,
    )
    with pytest.raises(InfrastructureError, match="the grading process died"):
        collect(coordinator, n_samples=1)
