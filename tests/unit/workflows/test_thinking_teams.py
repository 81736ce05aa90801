"""Thinking models in a team: what each agent, the coach and the verifier in code are shown of it.

On look-alikes of Qwen3's template, which drops thinking from history and may close it in the prompt, and of R1's
distillates', which opens it there.
"""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from lightning_mappa.rollout.coordinator import RolloutCoordinator
from lightning_mappa.rollout.engine import SamplingParams
from lightning_mappa.rollout.plan import RolloutPlan, SeatContext
from lightning_mappa.testing import ScriptedCoach, ScriptedEngine
from lightning_mappa.types import Action, Episode, StopReason, Task
from lightning_mappa.workflows.conversation import ChatFormat
from lightning_mappa.workflows.prompts import PromptTemplate
from lightning_mappa.workflows.seat import AgentSeat, AgentSpec
from lightning_mappa.workflows.sequential import SequentialWorkflow
from tests.unit.workflows.table import EVERYTHING, Sums
from tests.unit.workflows.templates import FAMILIES, Family

QWEN = FAMILIES["strips_thinking"]
# What Qwen3 writes with thinking switched off: it stands closed in the prompt.
QWEN_CLOSED = Family(
    template=QWEN.template.replace(
        "<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n\n</think>\n\n{% endif %}"
    ),
    special=QWEN.special,
    added=QWEN.added,
)
R1 = FAMILIES["opens_thinking"]
TASK = Task(id="t", kind="math", prompt="1+2?", reference="3")
ORDER = ("solver", "executor", "verifier")


@dataclass(frozen=True)
class Played:
    episode: Episode
    judged: dict[int, str]
    """What the coach was given as the text of each action."""
    prompts: list[str]
    """What each call was generated from, decoded."""


class Boxed:
    def tasks(self, split: str) -> list[Task]:
        return [TASK]

    def answer(self, text: str) -> str | None:
        return text or None

    def grade(self, task: Task, answer: str | None) -> float | None:
        return float(answer == task.reference)


@contextmanager
def no_workspace(episode_id: str):
    yield Path("/workspace")


def play(family: Family, answers: dict[str, list[str]], *, max_new_tokens: int = 200) -> Played:
    tokenizer = family.tokenizer()
    chat = ChatFormat(tokenizer)
    left = {name: list(texts) for name, texts in answers.items()}
    engine = ScriptedEngine(lambda request, prompt: left[request.agent_id].pop(0), tokenizer, context_length=4000)
    judged: dict[int, str] = {}

    def judge(episode: Episode, index: int) -> float:
        judged[index] = episode.actions[index].text
        return 5.0

    def seat_for(agent_id: str, context: SeatContext) -> AgentSeat:
        return AgentSeat(
            spec=AgentSpec(
                agent_id=agent_id,
                role=agent_id.title(),
                system="S",
                user=PromptTemplate(EVERYTHING, agent_id=agent_id, key="user"),
                observation=PromptTemplate("saw {{ result.stdout | trim }}", agent_id=agent_id, key="observation"),
                chat=chat,
                sampling=SamplingParams(max_new_tokens=max_new_tokens),
                context_length=4000,
                tools=(Sums(),) if agent_id == "executor" else (),
                max_turns=2 if agent_id == "executor" else 1,
            ),
            episode_id=context.episode_id,
            session=context.session,
            workspace=context.workspace,
            seed=lambda agent, turn: turn,
            actions=context.actions,
        )

    coordinator = RolloutCoordinator(
        workflow=SequentialWorkflow(ORDER),
        source=Boxed(),
        engine=engine,
        coach=ScriptedCoach(judge),
        seat_for=seat_for,
        workspaces=no_workspace,
        max_episodes_in_flight=4,
        deadline_s=60.0,
    )
    plan = RolloutPlan(split="train", step=0, tasks=[TASK], n_samples=1, temperature=1.0, scored=True)
    (scored,) = asyncio.run(coordinator.collect(plan)).episodes
    prompts = [str(tokenizer.decode(list(request.prompt_ids))) for request in engine.requests]
    return Played(episode=scored.episode, judged=judged, prompts=prompts)


def of(actions: tuple[Action, ...], agent_id: str) -> list[Action]:
    return [action for action in actions if action.agent_id == agent_id]


SAID = {
    "strips_thinking": {
        "solver": ["<think>\nmaybe sum(9+9)\n</think>\n\n4"],
        "executor": ["<think>sly</think>sum(1+2)", "<think>odd</think>\n\nit is 3"],
        "verifier": ["<think>\nwell\n</think>\n\n3"],
    },
    # The opening tag stands in the prompt, so no response has it.
    "opens_thinking": {
        "solver": ["maybe sum(9+9)\n</think>\n\n4"],
        "executor": ["sly</think>sum(1+2)", "odd</think>\n\nit is 3"],
        "verifier": ["well\n</think>\n\n3"],
    },
}
THOUGHTS = ("maybe", "sly", "odd", "well")


@pytest.mark.parametrize("name", SAID)
def test_the_coach_sees_the_thinking_and_the_other_agents_do_not(name):
    played = play(FAMILIES[name], SAID[name])
    assert [a.agent_id for a in played.episode.actions] == ["solver", "executor", "executor", "verifier"]
    assert [thought in played.judged[i] for i, thought in enumerate(THOUGHTS)] == [True] * 4
    asked = [action.prompt_text for action in played.episode.actions]
    assert not any(thought in text for text in asked for thought in THOUGHTS)
    assert asked[1] == "1+2?|solver:4:None"
    assert asked[3] == "1+2?|solver:4:None|executor:it is 3:3"
    assert "</think>" not in asked[1] + asked[3]


@pytest.mark.parametrize("name", SAID)
def test_thinking_runs_no_tool_and_is_no_answer(name):
    played = play(FAMILIES[name], SAID[name])
    assert [len(action.tool_calls) for action in played.episode.actions] == [0, 1, 0, 0]
    assert (played.episode.answer, played.episode.outcome) == ("3", 1.0)


@pytest.mark.parametrize("name", SAID)
def test_an_agent_s_own_thinking_stays_in_its_context_as_sampled(name):
    played = play(FAMILIES[name], SAID[name])
    first, second = of(played.episode.actions, "executor")
    context = first.prompt_ids + first.response_ids
    assert second.prompt_ids[: len(context)] == context
    assert "sly</think>" in played.prompts[2]
    opening = [prompt.rstrip().endswith("<think>") for prompt in played.prompts]
    assert opening == [name == "opens_thinking"] * 4


@pytest.mark.parametrize("name", SAID)
def test_thinking_that_was_cut_is_handed_on_as_nothing(name):
    opening = "<think>" if name == "strips_thinking" else ""
    said = {**SAID[name], "verifier": [opening + "I wonder " * 50]}
    played = play(FAMILIES[name], said, max_new_tokens=60)
    last = played.episode.actions[-1]
    assert last.stop_reason is StopReason.LENGTH
    assert "I wonder" in played.judged[3]
    assert (played.episode.answer, played.episode.outcome) == (None, 0.0)


def test_thinking_switched_off_is_closed_in_the_prompt_and_answers_are_plain():
    chat = ChatFormat(QWEN_CLOSED.tokenizer())
    assert not chat.opens_thinking
    said = {"solver": ["4"], "executor": ["sum(1+2)", "it is 3"], "verifier": ["3"]}
    played = play(QWEN_CLOSED, said)
    assert all(prompt.endswith("<think>\n\n</think>\n\n") for prompt in played.prompts)
    assert [action.prompt_text for action in played.episode.actions][3] == "1+2?|solver:4:None|executor:it is 3:3"
    assert played.episode.outcome == 1.0
