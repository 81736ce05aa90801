"""A control: the right scores on the wrong actions."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Mapping
from typing import Any

from lightning_mappa.coaches.base import Coach, ask
from lightning_mappa.types import Episode, Verdict


class ShuffledCoach:
    """A `StatefulCoach`. Gives an action the score that `coach` gave to a random earlier action of the same agent.

    Scores keep their distribution per agent and lose what they say of the action. A system that still
    improves under it does not learn from the verdicts. Missing verdicts stay where they are.

    Args:
        memory: scores remembered per agent, the action's own among them.
    """

    name = "shuffled"
    needs_outcome = True
    """Early verdicts would come, and be drawn from, in an order that depends on timing."""

    def __init__(self, coach: Coach, seed: int = 0, memory: int = 256) -> None:
        self.parts = (coach,)
        self._random = random.Random(seed)
        self._scores: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=memory))

    async def score(self, episode: Episode, index: int) -> Verdict:
        verdict = await ask(self.parts[0], episode, index)
        if verdict.score is None:
            return verdict
        scores = self._scores[episode.actions[index].agent_id]
        scores.append(verdict.score)
        return Verdict(
            score=self._random.choice(scores),
            reason=f"drawn from the scores of other actions; its own: {verdict.score:g}",
            coach=self.name,
            raw_score=verdict.score,
        )

    def state_dict(self) -> dict[str, Any]:
        scores = {agent_id: list(remembered) for agent_id, remembered in self._scores.items()}
        return {"random": self._random.getstate(), "scores": scores}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        version, internal, gauss = state["random"]  # JSON has made lists of the tuples
        self._random.setstate((version, tuple(internal), gauss))
        self._scores.clear()
        for agent_id, remembered in state["scores"].items():
            self._scores[agent_id].extend(remembered)
