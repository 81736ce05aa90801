"""What only shows over many verdicts."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Mapping
from typing import Any

from lightning_mappa.coaches.base import not_judged
from lightning_mappa.coaches.parse import Reading
from lightning_mappa.errors import CoachError, ConfigError
from lightning_mappa.types import Action, Verdict

CONSTANT_AFTER = 200
"""The same score so often in a row says nothing of the actions."""

_log = logging.getLogger(__name__)


class Watch:
    """Counts the readings of one model and their alarms, and warns where it has become constant or another model."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._run: tuple[float | None, int] = (None, 0)
        self._model: str | None = None

    def see(self, reading: Reading, model: str) -> None:
        self.counts.update(("verdicts", *reading.alarms))
        if reading.score is None:
            self.counts["missing"] += 1
            return
        self._see_model(model)
        last, times = self._run
        self._run = (reading.score, times + 1 if reading.score == last else 1)
        if self._run[1] == CONSTANT_AFTER:
            self.counts["constant"] += 1
            _log.warning("the coach %s gave %g to %d actions in a row", model, reading.score, CONSTANT_AFTER)

    def _see_model(self, model: str) -> None:
        if self._model not in (None, model):
            self.counts["model_changed"] += 1
            _log.warning("the coach's replies come from %s, earlier ones from %s", model, self._model)
        self._model = model


class MissingWatch:
    """Ends the run when more than `max_rate` (0 … 1) of the last `window` verdicts are missing.

    A verdict is what a whole coach says of one action, whatever it is made of. Actions of which there is nothing to
    judge do not count: no coach can (`not_judged`), or the coach says so (`Verdict.unjudgeable`).
    """

    def __init__(self, max_rate: float = 0.2, window: int = 32) -> None:
        if isinstance(max_rate, bool) or not isinstance(max_rate, (int, float)) or not 0 <= max_rate <= 1:
            raise ConfigError(f"coach.max_missing_rate is {max_rate!r}; allowed: 0 to 1, or null")
        if isinstance(window, bool) or not isinstance(window, int) or window < 1:
            raise ConfigError(f"coach.missing_window is {window!r}; allowed: 1 or more, or null")
        self._max_rate = max_rate
        self._window = window
        self._missing: deque[bool] = deque(maxlen=window)

    def see(self, action: Action, verdict: Verdict) -> None:
        """Raises `CoachError` when too many of the last verdicts are missing."""
        if not_judged(action) is not None or (verdict.score is None and verdict.unjudgeable):
            return
        self._missing.append(verdict.score is None)
        missing = sum(self._missing)
        # Before the window is full, too: enough are missing for it to be too many however the rest turns out.
        if verdict.score is None and missing > self._max_rate * self._window:
            raise CoachError(
                f"{missing} of the last {len(self._missing)} verdicts are missing; with more than "
                f"coach.max_missing_rate={self._max_rate:g} of {self._window} the run stops. The last: "
                f"{verdict.reason}. It can go on with resume"
            )


def missing_watch(coach: Mapping[str, Any]) -> MissingWatch | None:
    """The watch of the config's `coach`; None where `max_missing_rate` or `missing_window` is null."""
    rate, window = coach.get("max_missing_rate", 0.2), coach.get("missing_window", 32)
    return None if rate is None or window is None else MissingWatch(rate, window)
