"""Scores held down by what a program says, where files and metrics do not show the fault."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_mappa.algorithm.rewards import SCORE_RANGE
from lightning_mappa.coaches.base import Coach, ask, rescored
from lightning_mappa.errors import ConfigError
from lightning_mappa.types import Episode, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A fault that can be read off the text of one agent's program."""

    name: str
    agent: str
    """Agent id."""
    pattern: re.Pattern[str]
    """Found anywhere in the program."""
    cap: float
    """The most that an action with such a program may score, 0 … 10."""
    kind: str = ""
    """Beginning of the kind of the tasks it is for; empty is all."""

    def concerns(self, episode: Episode, index: int) -> bool:
        action = episode.actions[index]
        if action.agent_id != self.agent or not episode.task.kind.startswith(self.kind):
            return False
        return any(self.pattern.search(str(call.arguments.get("code", ""))) for call in action.tool_calls)


class MarkedCoach:
    """A `Coach` whose scores end at the lowest cap of the marks on the action's programs.

    For faults that leave every file in its place and may even pay: fitting on the rows to be predicted, a model of
    the wrong kind that a later agent falls over. Missing verdicts stay missing. `Verdict.raw_score` is what the coach
    itself gave.

    Args:
        marks: name → `agent`, `pattern` (a regular expression), `cap` and, where it is not for all tasks, `kind`.
    """

    def __init__(self, coach: Coach, marks: Mapping[str, Mapping[str, Any]]) -> None:
        self.name = coach.name
        self.parts = (coach,)
        self._marks = tuple(_mark(name, dict(given)) for name, given in marks.items())

    async def score(self, episode: Episode, index: int) -> Verdict:
        verdict = await ask(self.parts[0], episode, index)
        if verdict.score is None:
            return verdict
        found = [mark for mark in self._marks if mark.concerns(episode, index)]
        lowest = min(found, key=lambda mark: mark.cap, default=None)
        if lowest is None or verdict.score <= lowest.cap:
            return verdict
        return rescored(verdict, lowest.cap, f"capped at {lowest.cap:g} for {lowest.name}: {verdict.reason}")


def _mark(name: str, given: Mapping[str, Any]) -> Mark:
    where = f"coach.marks.{name}"
    if not {"agent", "pattern", "cap"} <= set(given) <= {"agent", "pattern", "cap", "kind"}:
        raise ConfigError(f"{where} has {', '.join(given)}; give agent, pattern and cap, and kind if it is not for all")
    cap = float(given["cap"])
    if not 0 <= cap <= SCORE_RANGE:
        raise ConfigError(f"{where}.cap={cap:g}; allowed: 0 to {SCORE_RANGE:g}")
    try:
        pattern = re.compile(given["pattern"])
    except re.error as error:
        raise ConfigError(f"{where}.pattern={given['pattern']}: no regular expression, {error}") from error
    return Mark(name=name, agent=str(given["agent"]), pattern=pattern, cap=cap, kind=str(given.get("kind", "")))
