"""What a coach is to the rollout coordinator."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from lightning_mappa.types import Episode, Verdict


class Coach(Protocol):
    """Scores single actions 0–10. It never decides whether the answer is right: a verifier in code does."""

    name: str

    async def score(self, episode: Episode, index: int) -> Verdict:
        """The verdict on `episode.actions[index]`.

        Called once the episode has ended, for many actions at a time; or as soon as the action is done, see
        `needs_outcome`. A call that fails returns a Verdict without a score and with the reason; it does not
        raise, except `CoachError` to stop the run.
        """
        ...


@runtime_checkable
class StatefulCoach(Coach, Protocol):
    """A coach whose verdicts depend on earlier ones: a checkpoint holds what it remembers."""

    def state_dict(self) -> Mapping[str, Any]:
        """JSON-able."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


def coach_state(coach: Coach) -> Mapping[str, Any]:
    """What a checkpoint keeps of the coach; nothing of one that remembers nothing."""
    return coach.state_dict() if isinstance(coach, StatefulCoach) else {}


def load_coach_state(coach: Coach, state: Mapping[str, Any]) -> None:
    if isinstance(coach, StatefulCoach):
        coach.load_state_dict(state)


@runtime_checkable
class KeepsAccounts(Protocol):
    """A coach, or a part of one, whose calls cost money."""

    def bind(self, folder: Path) -> None:
        """Names the run folder, once, before the first verdict: accounts are kept there, and read on resume."""
        ...

    def summary(self) -> Mapping[str, Any]:
        """JSON-able totals of the run so far, resumed parts included; `calls` and `usd` where known."""
        ...


def bind_accounts(part: object, folder: Path) -> None:
    if isinstance(part, KeepsAccounts):
        part.bind(folder)


def accounts(part: object) -> Mapping[str, Any]:
    """Nothing of a coach that costs nothing."""
    return part.summary() if isinstance(part, KeepsAccounts) else {}


def needs_outcome(coach: Coach) -> bool:
    """Whether `score` waits for the end of the episode.

    A coach with `needs_outcome = False` is given, as soon as an action and its tools are done, an episode that ends
    with this action: without answer, outcome and status. Its verdicts then cost no time at the end.
    """
    return bool(getattr(coach, "needs_outcome", True))
