"""One agent at the table of one episode: it reads, generates, runs its tools, and hands on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_mappa.errors import ConfigError
from lightning_mappa.file_trail import file_trail
from lightning_mappa.rollout.engine import Generation, GenerationRequest, SamplingParams, Session
from lightning_mappa.thinking import THINK, strip_thinking
from lightning_mappa.tools.base import Tool
from lightning_mappa.types import Action, ActionStatus, StopReason, Task, ToolCall, ToolResult, ToolStatus
from lightning_mappa.workflows.base import Message
from lightning_mappa.workflows.conversation import ChatFormat, Conversation
from lightning_mappa.workflows.prompts import PromptTemplate, observation, tool_output, user_prompt

_NOTHING = Generation(response_ids=(), log_probs=(), stop_reason=StopReason.NONE, policy_version=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSpec:
    """What one agent is in every episode."""

    agent_id: str
    role: str
    system: str
    user: PromptTemplate
    observation: PromptTemplate
    chat: ChatFormat
    sampling: SamplingParams
    context_length: int
    """Most tokens that prompt and response may have together."""
    tools: tuple[Tool, ...] = ()
    weights: str | None = None
    """The agent whose weights it acts with, where several share them; None: its own."""
    max_turns: int = 1
    """Generation calls each time the workflow lets it act; another follows only on a tool run."""

    def __post_init__(self) -> None:
        if self.max_turns < 1:
            raise ConfigError(f"agents.{self.agent_id}.max_turns={self.max_turns}: must be at least 1")


@dataclass(slots=True, kw_only=True)
class AgentSeat:
    """`workflows.base.Seat`: one agent in one episode. Context, tool use and turn count outlast an act."""

    spec: AgentSpec
    episode_id: str
    session: Session
    workspace: Path
    seed: Callable[[str, int], int]
    """Of (agent id, turn): the seed of that generation call."""
    actions: list[Action]
    """The episode's actions so far, shared by all its seats; every generation call is appended."""
    _conversation: Conversation | None = field(default=None, init=False)
    _last: Action | None = field(default=None, init=False)
    _turn: int = field(default=0, init=False)
    _used_tools: bool = field(default=False, init=False)

    @property
    def agent_id(self) -> str:
        return self.spec.agent_id

    @property
    def role(self) -> str:
        return self.spec.role

    async def act(self, task: Task, seen: Sequence[Message], **extra: Any) -> Message:
        spec = self.spec
        role, asked = "user", user_prompt(spec.user, task, seen, extra)
        if self._last and self._last.tool_results:  # of an earlier act that ran out of turns
            asked = f"{self._observe(self._last)}\n\n{asked}"
        handed_on: str | None = None
        taken: list[Action] = []
        for _ in range(spec.max_turns):
            action = self._last = await self._take_turn(role, asked)
            taken.append(action)
            if not action.tool_results:
                break
            handed_on = tool_output(action.tool_results[-1])
            role, asked = spec.chat.tool_role, self._observe(action)
        text = strip_thinking(self._from_opening_tag(action.text)).strip()
        return Message(
            agent_id=spec.agent_id, role=spec.role, text=text, tool_output=handed_on, files=file_trail(taken)
        )

    async def _take_turn(self, role: str, asked: str) -> Action:
        """Hears `asked`, generates, runs the tools called for, and records the action."""
        spec = self.spec
        prompt_ids = self._hear(role, asked)
        if len(prompt_ids) + spec.sampling.max_new_tokens > spec.context_length:
            return self._record(asked, status=ActionStatus.PROMPT_TOO_LONG)
        seed = self.seed(spec.agent_id, self._turn)
        owner = spec.weights or spec.agent_id
        request = GenerationRequest(agent_id=owner, prompt_ids=prompt_ids, sampling=spec.sampling, seed=seed)
        generation = await self.session.generate(request)
        text = spec.chat.decode(generation.response_ids)
        written = self._from_opening_tag(text)
        calls = [(tool, call) for tool in spec.tools for call in tool.parse(written)]
        no_code = bool(spec.tools) and not calls and not self._used_tools
        self._used_tools |= bool(calls)
        results = [await self._run(tool, call) for tool, call in calls]
        return self._record(
            asked,
            status=ActionStatus.NO_CODE if no_code else ActionStatus.OK,
            prompt_ids=prompt_ids,
            generation=generation,
            text=text,
            tool_calls=tuple(call for _, call in calls),
            tool_results=tuple(results),
            seed=seed,
        )

    def _hear(self, role: str, content: str) -> tuple[int, ...]:
        """Takes the last response and the message that answers it into the context, and returns that."""
        if self._conversation is None or self._last is None:
            self._conversation = Conversation(self.spec.chat, system=self.spec.system, user=content)
        else:
            self._conversation.extend(self._last.response_ids, role=role, content=content)
        return self._conversation.prompt_ids

    async def _run(self, tool: Tool, call: ToolCall) -> ToolResult:
        """Runs a call, and once more where the sandbox and not the program failed."""
        result = await tool.run(call, self.workspace)
        if result.status is ToolStatus.SANDBOX_ERROR:
            result = await tool.run(call, self.workspace)
        return result

    def _observe(self, action: Action) -> str:
        return observation(action.tool_results, self.spec.observation)

    def _from_opening_tag(self, text: str) -> str:
        """The response with the opening of its thinking, which some templates put into the prompt."""
        return THINK + text if self.spec.chat.opens_thinking else text

    def _record(self, asked: str, *, generation: Generation = _NOTHING, **fields: Any) -> Action:
        action = Action(
            episode_id=self.episode_id,
            index=len(self.actions),
            agent_id=self.spec.agent_id,
            role=self.spec.role,
            turn=self._turn,
            prompt_text=asked,
            response_ids=generation.response_ids,
            rollout_log_probs=generation.log_probs,
            stop_reason=generation.stop_reason,
            policy_version=generation.policy_version,
            temperature=self.spec.sampling.temperature,
            weights=self.spec.weights,
            **{"prompt_ids": (), "text": "", **fields},
        )
        self.actions.append(action)
        self._turn += 1
        return action
