"""What only shows over many verdicts of one coach."""

from __future__ import annotations

import logging
from collections import Counter, deque

from lightning_mappa.coaches.parse import Reading
from lightning_mappa.errors import CoachError, ConfigError

CONSTANT_AFTER = 200
"""The same score so often in a row says nothing of the actions."""

_log = logging.getLogger(__name__)


class Watch:
    """Counts verdicts and alarms, warns of a coach that has become constant or another model, and stops the run when
    more than `max_missing_rate` of the last `window` verdicts are missing."""

    def __init__(self, max_missing_rate: float, window: int) -> None:
        if not 0 <= max_missing_rate <= 1:
            raise ConfigError(f"coach.max_missing_rate is {max_missing_rate}; allowed: 0 to 1")
        self.counts: Counter[str] = Counter()
        self._max_missing_rate = max_missing_rate
        self._missing: deque[bool] = deque(maxlen=window)
        self._run: tuple[float | None, int] = (None, 0)
        self._model: str | None = None

    def see(self, reading: Reading, model: str) -> None:
        """Raises `CoachError` when too many of the last verdicts are missing."""
        self.counts.update(("verdicts", *reading.alarms))
        self._missing.append(reading.score is None)
        if reading.score is None:
            self.counts["missing"] += 1
            self._refuse_too_many_missing(reading.reason)
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

    def _refuse_too_many_missing(self, reason: str) -> None:
        missing, window = sum(self._missing), self._missing.maxlen or 1
        # Before the window is full, too: enough are missing for it to be too many however the rest turns out.
        if missing > self._max_missing_rate * window:
            raise CoachError(
                f"{missing} of the last {len(self._missing)} verdicts are missing; with more than "
                f"coach.max_missing_rate={self._max_missing_rate:g} of {window} the run stops. The last: {reason}. "
                "It can go on with resume"
            )
