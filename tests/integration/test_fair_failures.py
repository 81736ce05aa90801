"""What counts as a failed run in the fair metrics: what the team did, and never what became of the machine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lightning_mappa.errors import InfrastructureError
from lightning_mappa.metrics import fair_metrics, success_metrics
from lightning_mappa.models.table_demos import PROGRAMS, fenced
from lightning_mappa.rollout.coordinator import RolloutCoordinator
from lightning_mappa.rollout.engine import Generation, GenerationRequest, SamplingParams
from lightning_mappa.rollout.plan import RolloutPlan, SeatContext
from lightning_mappa.tables.source import Tables
from lightning_mappa.testing import ScriptedCoach, ScriptedEngine, char_tokenizer
from lightning_mappa.tools.python import PythonTool
from lightning_mappa.tools.workspace import Workspaces
from lightning_mappa.types import EpisodeStatus, ScoredEpisode, Task, ToolResult, ToolStatus
from lightning_mappa.workflows.conversation import ChatFormat
from lightning_mappa.workflows.file_relay import FileRelay
from lightning_mappa.workflows.prompts import PromptTemplate
from lightning_mappa.workflows.seat import AgentSeat, AgentSpec

TOKENIZER = char_tokenizer()
WORDS = "Nothing to run."
STAGES: dict[str, dict[str, list[str]]] = {"engineer": {}, "modeler": {}, "analyst": {}}
PAPER = {"fair/accuracy": 0.5, "fair/f1": 0.0}
Says = Callable[[str], str]


class SlowEngine(ScriptedEngine):
    """Takes longer than any episode may."""

    async def generate(self, request: GenerationRequest) -> Generation:
        await asyncio.sleep(60)
        raise AssertionError("the deadline was not kept")


class NoSandbox(PythonTool):
    async def run(self, call: Any, workspace: Any) -> ToolResult:
        return ToolResult(status=ToolStatus.SANDBOX_ERROR, reason="no namespace")


@pytest.fixture(scope="module")
def source() -> Iterator[Tables]:
    source = Tables(seed=5, generated={"train": 2, "selection": 1, "report": 1})
    yield source
    source.close()


def play(
    source: Tables,
    says: Says,
    *,
    engine: type[ScriptedEngine] = ScriptedEngine,
    tool: Any = None,
    deadline_s: float = 120,
) -> ScoredEpisode:
    """One episode on a table of classification; every agent has one turn."""
    tool = tool or PythonTool(wall_s=60.0, cpu_s=30, memory_mb=2048)

    def seat(agent_id: str, context: SeatContext) -> AgentSeat:
        template = PromptTemplate("go", agent_id=agent_id, key="user")
        spec = AgentSpec(
            agent_id=agent_id,
            role=agent_id,
            system="",
            user=template,
            observation=template,
            chat=ChatFormat(TOKENIZER),
            sampling=SamplingParams(max_new_tokens=1500),
            context_length=2048,
            tools=(tool,),
        )
        return AgentSeat(
            spec=spec,
            episode_id=context.episode_id,
            session=context.session,
            workspace=context.workspace,
            seed=lambda agent, turn: turn,
            actions=context.actions,
        )

    coordinator = RolloutCoordinator(
        workflow=FileRelay(STAGES),
        source=source,
        engine=engine(lambda request, _: says(request.agent_id), TOKENIZER),
        coach=ScriptedCoach(lambda episode, index: 5.0),
        seat_for=seat,
        workspaces=lambda episode_id: Workspaces().open(),
        max_episodes_in_flight=4,
        deadline_s=deadline_s,
    )
    task = first_table(source)
    plan = RolloutPlan(split="train", step=0, tasks=[task], n_samples=1, temperature=1.0, scored=True)

    async def collect() -> ScoredEpisode:
        playing = await coordinator.play(plan)
        return (await asyncio.gather(*playing.scoring))[0]

    try:
        return asyncio.run(collect())
    finally:
        tool.close()


def first_table(source: Tables) -> Task:
    return next(task for task in source.tasks("train") if task.metadata["type"] == "classification")


def counted(*episodes: ScoredEpisode) -> tuple[dict[str, float], float]:
    found = fair_metrics(episodes)
    return {name: value for name, value in found.items() if not name.endswith("/n")}, success_metrics(episodes)[
        "ungraded"
    ]


def test_an_agent_that_uses_up_its_turns_has_failed(source):
    """Its one turn goes to words, so that nothing is handed in."""
    scored = play(source, lambda agent: WORDS)
    assert (scored.episode.status, scored.episode.fault, scored.episode.outcome) == (EpisodeStatus.OK, "missing", 0.0)
    assert counted(scored) == (PAPER, 0.0)


def test_an_agent_that_is_cut_at_its_tokens_has_failed(source):
    scored = play(source, lambda agent: "x" * 3000)
    assert {action.truncated for action in scored.episode.actions} == {True}
    assert counted(scored) == (PAPER, 0.0)


def test_a_program_that_uses_up_its_time_has_failed(source):
    def says(agent: str) -> str:
        return fenced("while True: pass") if agent == "modeler" else WORDS

    scored = play(source, says, tool=PythonTool(wall_s=1.0, cpu_s=10))
    (result,) = [result for action in scored.episode.actions for result in action.tool_results]
    assert result.status is ToolStatus.TIMEOUT
    assert counted(scored) == (PAPER, 0.0)


def test_an_episode_that_is_cut_by_its_deadline_has_not(source):
    scored = play(source, lambda agent: WORDS, engine=SlowEngine, deadline_s=0.5)
    assert scored.episode.status is EpisodeStatus.FAILED
    assert "Timeout" in scored.episode.reason
    assert scored.episode.outcome is None
    assert counted(scored) == ({}, 1.0)


def test_an_episode_whose_engine_fails_has_not(source):
    def says(agent: str) -> str:
        if agent == "analyst":
            raise InfrastructureError("the engine is gone")
        return WORDS

    scored = play(source, says)
    assert (scored.episode.status, scored.episode.reason) == (EpisodeStatus.FAILED, "the engine is gone")
    assert counted(scored) == ({}, 1.0)


def test_an_episode_whose_sandbox_fails_has_not(source):
    task = first_table(source)
    scored = play(source, lambda agent: fenced(PROGRAMS[agent](task)), tool=NoSandbox())
    assert scored.episode.outcome is None
    assert scored.episode.reason == "not graded: the sandbox failed for engineer"
    assert counted(scored) == ({}, 1.0)


def test_failures_of_the_machine_do_not_move_the_mean(source):
    task = first_table(source)
    right = play(source, lambda agent: fenced(PROGRAMS[agent](task)))
    assert right.episode.outcome == 1.0
    cut = play(source, lambda agent: WORDS, engine=SlowEngine, deadline_s=0.5)
    refused = play(source, lambda agent: WORDS)
    accuracy = right.episode.metrics["accuracy"]
    assert fair_metrics([right, cut, refused])["fair/accuracy"] == pytest.approx((accuracy + 0.5) / 2)
    assert fair_metrics([right, cut])["fair/accuracy/n"] == 1
