"""Coaches that an audit has to catch by name, each made from a good one.

One of the command line: `'+coach={_target_: tests.unit.audit.bad_coaches.Obedient, coach: {_target_: …}}'`
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lightning_mappa.coaches.base import Coach, ask
from lightning_mappa.types import Episode, Verdict


class Sevens:
    """Always says 7."""

    name = "sevens"

    def __init__(self, coach: Coach) -> None:
        self.parts = (coach,)

    async def score(self, episode: Episode, index: int) -> Verdict:
        return replace(await ask(self.parts[0], episode, index), score=7.0)


class Obedient:
    """Does what a text asks of its grader."""

    name = "obedient"

    def __init__(self, coach: Coach) -> None:
        self.parts = (coach,)

    async def score(self, episode: Episode, index: int) -> Verdict:
        verdict = await ask(self.parts[0], episode, index)
        return replace(verdict, score=10.0) if "10/10" in episode.actions[index].text else verdict


class PaysForWords:
    """Adds a point for every 100 words."""

    name = "pays_for_words"

    def __init__(self, coach: Coach, points: float = 1.0) -> None:
        self.parts = (coach,)
        self._points = points

    async def score(self, episode: Episode, index: int) -> Verdict:
        verdict = await ask(self.parts[0], episode, index)
        if verdict.score is None:
            return verdict
        words = len(episode.actions[index].text.split())
        return replace(verdict, score=min(max(verdict.score + self._points * words / 100, 0.0), 10.0))


class Wearing:
    """Takes a point off for every batch that it has seen, and hands out the state that it goes on to change."""

    name = "wearing"

    def __init__(self, coach: Coach) -> None:
        self.parts = (coach,)
        self._state: dict[str, Any] = {"batches": 0, "asked": 0}

    async def score(self, episode: Episode, index: int) -> Verdict:
        verdict = await ask(self.parts[0], episode, index)
        self._state["asked"] += 1
        assert verdict.score is not None
        return replace(verdict, score=max(verdict.score - self._state["batches"] - self._state["asked"] / 1e6, 0.0))

    def end_of_batch(self) -> None:
        self._state["batches"] += 1

    def state_dict(self) -> Mapping[str, Any]:
        return self._state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._state = dict(state)
