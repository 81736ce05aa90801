"""Several things closed one after the other, each whether or not another can be."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable

_log = logging.getLogger(__name__)


def close_all(parts: Iterable[object]) -> None:
    """Calls `close` of every part that has one.

    Raises the first error once all are closed; where an exception is under way already, that one goes on, and errors
    of closing are logged.
    """
    under_way = sys.exception()
    first: Exception | None = None
    for part in parts:
        close = getattr(part, "close", None)
        if close is None:
            continue
        try:
            close()
        except Exception as error:
            if under_way is not None or first is not None:
                _log.warning("%s cannot be closed: %s: %s", type(part).__name__, type(error).__name__, error)
            first = first or error
    if first is not None and under_way is None:
        raise first
