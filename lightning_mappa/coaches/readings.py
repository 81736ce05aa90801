"""What one call, or several to the same end, say of the actions that they are about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lightning_mappa.coaches.parse import Reading


@dataclass(frozen=True, slots=True, kw_only=True)
class Readings:
    by_index: Mapping[int, Reading]
    """By the index of the action in its episode."""
    model: str
    """That replied last."""
    replayed: bool = False
    """The last reply was not asked for: an earlier process, or another run, was given it."""

    @property
    def complete(self) -> bool:
        return all(reading.score is not None for reading in self.by_index.values())

    @property
    def ask_again(self) -> bool:
        return any(reading.ask_again for reading in self.by_index.values())

    @property
    def cut(self) -> bool:
        return any(reading.cut for reading in self.by_index.values())

    def lost(self, indices: Sequence[int], reason: str) -> Readings:
        """Before a call that failed: what was read stays, and the rest is missing for `reason`."""
        missing = Reading(score=None, reason=reason)
        read = {index: reading for index, reading in self.by_index.items() if not reading.ask_again}
        return Readings(by_index={index: read.get(index, missing) for index in indices}, model=self.model)

    def asked_twice(self, again: Readings) -> Readings:
        """Before a second reply: its readings where the first were at fault."""
        pairs = {index: (first, again.by_index[index]) for index, first in self.by_index.items()}
        return replace(again, by_index={index: _asked_twice(*pair) for index, pair in pairs.items()})

    def filled(self, again: Readings) -> Readings:
        """Replayed, and before replies that were asked for anew: scores stay, and the rest is read from those."""
        pairs = {index: (first, again.by_index[index]) for index, first in self.by_index.items()}
        return replace(again, by_index={index: _filled(*pair) for index, pair in pairs.items()})


def _asked_twice(first: Reading, again: Reading) -> Reading:
    if not first.ask_again:
        return first
    reason = again.reason if again.score is not None else f"{again.reason}; asked twice"
    return replace(again, reason=reason, alarms=("asked_again", *first.alarms, *again.alarms))


def _filled(first: Reading, again: Reading) -> Reading:
    return first if first.score is not None else replace(again, alarms=("passed_over", *again.alarms))
