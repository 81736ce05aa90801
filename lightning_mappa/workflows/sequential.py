"""One agent after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lightning_mappa.errors import ConfigError
from lightning_mappa.types import Task
from lightning_mappa.workflows.base import Message, Seat

VISIBILITIES = ("full", "partial")


class SequentialWorkflow:
    """Each agent acts once, in `order`; the last one's text is the system's answer.

    With `visibility` full an agent reads what all earlier ones handed on, with partial only the previous one.
    """

    def __init__(self, order: Sequence[str], visibility: str = "full") -> None:
        if not order or len(set(order)) != len(order):
            raise ConfigError(f"workflow.order={list(order)}: name at least one agent, and each once")
        if visibility not in VISIBILITIES:
            raise ConfigError(f"workflow.visibility={visibility}: allowed are {', '.join(VISIBILITIES)}")
        self._order = tuple(order)
        self._visibility = visibility

    @property
    def agent_ids(self) -> Sequence[str]:
        return self._order

    @property
    def last_agent_id(self) -> str:
        return self._order[-1]

    async def run(self, task: Task, agents: Mapping[str, Seat]) -> str:
        said: list[Message] = []
        for agent_id in self._order:
            seen = said if self._visibility == "full" else said[-1:]
            said.append(await agents[agent_id].act(task, tuple(seen)))
        return said[-1].text
