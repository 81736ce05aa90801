"""Actions, episodes and experiences of which a test names only what it is about."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_mappa.types import (
    Action,
    ActionStatus,
    Episode,
    Experience,
    ScoredEpisode,
    StopReason,
    Task,
    Verdict,
)


def make_action(*, agent_id: str = "solver", response_ids: Sequence[int] = (3, 4), **fields: Any) -> Action:
    """One log-prob of −1 per response id unless given."""
    defaults: dict[str, Any] = {
        "episode_id": "e",
        "index": 0,
        "role": agent_id,
        "turn": 0,
        "prompt_ids": (1, 2),
        "rollout_log_probs": (-1.0,) * len(response_ids),
        "prompt_text": "?",
        "text": "x",
        "status": ActionStatus.OK,
        "stop_reason": StopReason.STOP,
    }
    return Action(agent_id=agent_id, response_ids=tuple(response_ids), **{**defaults, **fields})


def make_scored(
    episode_id: str, actions: Sequence[Action], scores: Sequence[float | None], **fields: Any
) -> ScoredEpisode:
    """An episode of these actions, its outcome 1 unless given, with one verdict per action."""
    task = Task(id=episode_id, kind="test", prompt="?")
    episode = Episode(id=episode_id, actions=tuple(actions), **{"task": task, "outcome": 1.0, **fields})
    verdicts = tuple(Verdict(score=score, reason="scripted", coach="test") for score in scores)
    return ScoredEpisode(episode=episode, verdicts=verdicts)


def make_experience(*, response_ids: Sequence[int] = (3, 4), **fields: Any) -> Experience:
    """One log-prob of −1 per response id unless given."""
    defaults: dict[str, Any] = {
        "key": ("e", 0),
        "agent_id": "solver",
        "turn": 0,
        "prompt_ids": (1, 2),
        "rollout_log_probs": (-1.0,) * len(response_ids),
        "score": 5.0,
    }
    return Experience(response_ids=tuple(response_ids), **{**defaults, **fields})
