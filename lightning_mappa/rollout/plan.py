"""Which episodes to play, what a seat in one is made from, and what came of them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from lightning_mappa.rollout.engine import Session
from lightning_mappa.types import Action, ScoredEpisode, Task
from lightning_mappa.workflows.base import Seat


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutPlan:
    """Which episodes to play, and how."""

    split: str
    step: int
    """Rollout step, or the policy version that is evaluated."""
    tasks: Sequence[Task]
    n_samples: int
    temperature: float
    scored: bool
    """Whether the coach sees the actions."""

    @property
    def trained_on(self) -> bool:
        """An evaluation is not: it leaves the coach as it was, and draws the same samples at every version."""
        return self.split == "train"

    def episode_id(self, task_index: int, sample: int) -> str:
        """Sorts in the order of the plan."""
        return f"{self.split}-{self.step:06d}-{task_index:05d}-{sample:03d}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """Finished episodes in the order of the plan."""

    episodes: tuple[ScoredEpisode, ...]
    rollout_s: float
    """Until the last episode ended."""
    coach_s: float
    """From then until the last verdict."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Playing:
    """A rollout whose episodes have ended."""

    plan: RolloutPlan
    scoring: Sequence[asyncio.Task[ScoredEpisode]]
    rollout_s: float
    coach_before: Mapping[str, Any]
    """What the coach remembered when the first episode began."""

    async def cancel(self) -> None:
        for task in self.scoring:
            task.cancel()
        await asyncio.gather(*self.scoring, return_exceptions=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class SeatContext:
    """What a seat of one episode is made from, beside the agent's own settings."""

    plan: RolloutPlan
    task: Task
    sample: int
    episode_id: str
    session: Session
    workspace: Path
    actions: list[Action]
    """The episode's actions so far, shared by its seats, which append to it."""


class SeatFactory(Protocol):
    def __call__(self, agent_id: str, context: SeatContext) -> Seat: ...
