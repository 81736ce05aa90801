"""What a coach is to the rollout coordinator."""

from __future__ import annotations

from typing import Protocol

from lightning_mappa.types import Episode, Verdict


class Coach(Protocol):
    """Scores single actions 0–10. It never decides whether the answer is right: a verifier in code does."""

    name: str

    async def score(self, episode: Episode, index: int) -> Verdict:
        """The verdict on `episode.actions[index]`.

        Called once the episode has ended, for many actions at a time. A call that fails returns a Verdict
        without a score and with the reason; it does not raise, except `CoachError` to stop the run.
        """
        ...
