"""What a workflow is, and what it knows of an agent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from lightning_mappa.file_trail import TrailEntry
from lightning_mappa.types import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """What one agent hands to the next: its last text without thinking, its last tool output, and its files."""

    agent_id: str
    role: str
    text: str
    tool_output: str | None = None
    files: tuple[TrailEntry, ...] = ()
    """What its programs did to the folder while it acted, in their order."""


class Seat(Protocol):
    """One agent in one episode: its conversation, tools and turns."""

    @property
    def agent_id(self) -> str: ...

    @property
    def role(self) -> str: ...

    async def act(self, task: Task, seen: Sequence[Message], **extra: Any) -> Message:
        """Takes the agent's turns (generate, run tools, show it the results, …) and returns what it hands on.

        Every generation call becomes one Action of the episode. `seen` is what this agent may read of the
        earlier ones, in order; `extra` are further variables for its prompt.
        """
        ...


class Workflow(Protocol):
    """A topology in plain Python.

    `run` returns the answer text and not an Episode, because the episode must exist, with the actions taken
    so far, also when `run` is cut by a failure: the rollout coordinator owns it.
    """

    @property
    def agent_ids(self) -> Sequence[str]:
        """The agents it needs, in the order of their first turn."""
        ...

    async def run(self, task: Task, agents: Mapping[str, Seat]) -> str:
        """Plays one episode and returns the text that holds the system's answer."""
        ...


@runtime_checkable
class KnowsItsEnd(Protocol):
    """A workflow whose complete episodes all end with an action of one agent."""

    @property
    def last_agent_id(self) -> str:
        """Coaches that judge by the outcome wait for it with this agent's actions."""
        ...


def last_agent_id(workflow: Workflow) -> str | None:
    """None where the workflow does not know."""
    return workflow.last_agent_id if isinstance(workflow, KnowsItsEnd) else None
