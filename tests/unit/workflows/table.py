"""A small table to seat agents at: scripted answers, and a tool that runs what it can do without a sandbox."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from lightning_mappa.models.char_tokenizer import char_tokenizer
from lightning_mappa.rollout.engine import GenerationRequest, SamplingParams
from lightning_mappa.testing import ScriptedEngine
from lightning_mappa.tools.base import Tool
from lightning_mappa.types import Action, ToolCall, ToolResult, ToolStatus
from lightning_mappa.workflows.conversation import ChatFormat
from lightning_mappa.workflows.prompts import PromptTemplate
from lightning_mappa.workflows.seat import AgentSeat, AgentSpec

TOKENIZER = char_tokenizer()
CHAT = ChatFormat(TOKENIZER)
EVERYTHING = "{{ task.prompt }}{% for m in seen %}|{{ m.agent_id }}:{{ m.text }}:{{ m.tool_output }}{% endfor %}"


class Sums:
    """A `Tool` for calls written `sum(1+2)`; with `results`, those are returned one by one instead."""

    name = "sums"

    def __init__(self, results: Sequence[ToolResult] = ()) -> None:
        self.results = list(results)
        self.runs: list[tuple[ToolCall, Path]] = []

    def parse(self, text: str) -> list[ToolCall]:
        visible = text.rpartition("</think>")[2].partition("<think>")[0]
        return [
            ToolCall(name=self.name, arguments={"terms": terms}) for terms in re.findall(r"sum\(([0-9+]+)\)", visible)
        ]

    async def run(self, call: ToolCall, workspace: Path) -> ToolResult:
        self.runs.append((call, workspace))
        if self.results:
            return self.results.pop(0)
        total = sum(map(int, call.arguments["terms"].split("+")))
        return ToolResult(status=ToolStatus.OK, stdout=f"{total}\n", exit_code=0)


def spec(agent_id: str = "solver", **changes: object) -> AgentSpec:
    settings: dict[str, object] = {
        "agent_id": agent_id,
        "role": agent_id.title(),
        "system": "",
        "user": PromptTemplate(EVERYTHING, agent_id=agent_id, key="user"),
        "observation": PromptTemplate("saw {{ result.stdout | trim }}", agent_id=agent_id, key="observation"),
        "chat": CHAT,
        "sampling": SamplingParams(max_new_tokens=40, temperature=0.7),
        "context_length": 500,
    }
    return AgentSpec(**{**settings, **changes})  # type: ignore[arg-type]


def tools(*given: Tool) -> tuple[Tool, ...]:
    return given


class Table:
    """One episode: seats that share an engine with a script of answers per agent, and the list of actions."""

    def __init__(self, answers: dict[str, list[str]]) -> None:
        self.actions: list[Action] = []
        self._answers = {agent: list(texts) for agent, texts in answers.items()}
        self.engine = ScriptedEngine(self._next, TOKENIZER)

    def _next(self, request: GenerationRequest, prompt_text: str) -> str:
        return self._answers[request.agent_id].pop(0)

    def seat(self, given: AgentSpec, seed: Callable[[str, int], int] = lambda agent, turn: 100 + turn) -> AgentSeat:
        return AgentSeat(
            spec=given,
            episode_id="e",
            session=self.engine,
            workspace=Path("/workspace"),
            seed=seed,
            actions=self.actions,
        )
