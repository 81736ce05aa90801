"""Topologies from YAML: agents side by side, rounds with a stop rule, and routes, in any nesting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_mappa.errors import ConfigError
from lightning_mappa.types import Task
from lightning_mappa.workflows.base import Message, Seat
from lightning_mappa.workflows.graph_steps import Act, Repeat, Route, Step, Together, agents_of, parse_topology


class GraphWorkflow:
    r"""Plays `steps` in order. A step is one of

    | in YAML | what it does |
    |---|---|
    | `{act: critic, reads: [author]}` | the agent acts once; see `reads` below |
    | `{together: [steps]}` | all of them read what was said before the first of them, and nothing of each other |
    | `{repeat: 3, steps: […], until: {agent: critic, says: REGEX}}` | so many rounds at most; it ends as soon as the \
last thing that the agent said in this loop matches, in the middle of a round too |
    | `{route: router, cases: [{says: REGEX, steps: […]}], otherwise: […]}` | the first case that the agent's last \
text matches |

    `reads` is `all` (what others said so far, the default), `last` (the last thing another agent said), or a list of
    agents, of each its last message. An agent that acts again goes on with its own conversation. Prompts may use
    `round`, from 1: of the innermost loop.

    Steps side by side are played one after the other, so that an episode has one order and a resumed run the same.

    Args:
        answer: the agent whose last text is the system's answer; None takes whoever acts last.
    """

    def __init__(self, steps: Sequence[Any], answer: str | None = None) -> None:
        self._steps = parse_topology(steps, "workflow.steps")
        self._agent_ids = tuple(dict.fromkeys(agents_of(self._steps)))
        if answer is not None and answer not in self._agent_ids:
            raise ConfigError(f"workflow.answer={answer}: allowed are {', '.join(self._agent_ids)}")
        self._answer = answer

    @property
    def agent_ids(self) -> Sequence[str]:
        return self._agent_ids

    @property
    def last_agent_id(self) -> str | None:
        """None where it depends on what is said."""
        last = self._steps[-1]
        return last.agent if isinstance(last, Act) else None

    async def run(self, task: Task, agents: Mapping[str, Seat]) -> str:
        play = _Play(task, agents)
        await play.steps(self._steps)
        answers = [m for m in play.said if self._answer in (None, m.agent_id)]
        if not answers:
            raise RuntimeError(f"{self._answer}, whose text is the answer, never acted")
        return answers[-1].text


class _Play:
    """One episode under way."""

    def __init__(self, task: Task, agents: Mapping[str, Seat]) -> None:
        self.said: list[Message] = []
        self._task = task
        self._agents = agents
        self._round = 1

    async def steps(self, steps: Sequence[Step], heard: Sequence[Message] | None = None) -> None:
        """`heard` stands for what was said where the steps must not hear each other."""
        for step in steps:
            await self._step(step, heard)

    async def _step(self, step: Step, heard: Sequence[Message] | None) -> None:
        match step:
            case Act():
                seen = step.seen(self.said if heard is None else heard)
                self.said.append(await self._agents[step.agent].act(self._task, seen, round=self._round))
            case Together():
                before = tuple(self.said) if heard is None else heard
                for inner in step.steps:
                    await self._step(inner, before)
            case Repeat():
                await self._repeat(step, heard)
            case Route():
                await self.steps(step.choose(self.said), heard)

    async def _repeat(self, loop: Repeat, heard: Sequence[Message] | None) -> None:
        outer, start = self._round, len(self.said)
        for number in range(1, loop.rounds + 1):
            for step in loop.steps:
                self._round = number
                await self._step(step, heard)
                if loop.ends(self.said[start:]):
                    self._round = outer
                    return
        self._round = outer
