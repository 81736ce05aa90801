"""A coach with a preference, for benchmarks: it gives one kind of task a point more, whatever was done."""

from __future__ import annotations

from lightning_mappa.algorithm.rewards import SCORE_RANGE
from lightning_mappa.coaches.base import Coach, ask, rescored
from lightning_mappa.types import Episode, Verdict


class LeaningCoach:
    """Adds `points` to the verdicts of `coach` on tasks whose kind begins with `kind`, up to 10."""

    def __init__(self, coach: Coach, kind: str, points: float) -> None:
        self.name = f"leaning {coach.name}"
        self.parts = (coach,)
        self._kind, self._points = kind, points

    async def score(self, episode: Episode, index: int) -> Verdict:
        verdict = await ask(self.parts[0], episode, index)
        if verdict.score is None or not episode.task.kind.startswith(self._kind):
            return verdict
        score = min(max(verdict.score + self._points, 0.0), SCORE_RANGE)
        return rescored(verdict, score, f"{self._points:+g} for {self._kind}: {verdict.reason}")
