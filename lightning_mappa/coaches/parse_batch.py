"""From one reply to many steps to a score, or the reason why there is none, for each of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_mappa.coaches.parse import (
    Reading,
    ScoreSteps,
    UnreadableError,
    check_case,
    json_of,
    read_fields,
    unfinished,
)
from lightning_mappa.coaches.provider import CoachReply


def read_batch(
    reply: CoachReply, *, case: str, numbers: Sequence[int], steps: ScoreSteps = "integer"
) -> dict[int, Reading]:
    """One reading for each of the step `numbers`. Only JSON is read; never raises.

    A step that the reply leaves out, judges twice or gives no score is missing, alone. A step that was not asked for
    makes them all missing: the reply may count from another number, each of its verdicts then being about another
    step. So does a reply that does not repeat the `case`. Alarms beside those of `read_reply`: `lacking_step`,
    `repeated_step`, `extra_step`.
    """
    ended = unfinished(reply)
    if ended is not None:
        return dict.fromkeys(numbers, ended)
    try:
        entries = _entries(json_of(reply, case), case, numbers)
    except UnreadableError as fault:
        return dict.fromkeys(numbers, _missing(str(fault), fault.alarms))
    return {number: _reading(entries.get(number, []), number, steps) for number in numbers}


def _entries(value: Any, case: str, numbers: Sequence[int]) -> Mapping[int, Sequence[Mapping[str, Any]]]:
    check_case(value, case, "verdicts")
    if "case" not in value:  # With so many numbers in it, nothing else says what they are about.
        raise UnreadableError("the reply does not name the case", "wrong_case")
    verdicts = value["verdicts"]
    if not isinstance(verdicts, list):
        raise UnreadableError("the verdicts of the reply are no list")
    entries: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for entry in verdicts:
        step = entry.get("step") if isinstance(entry, Mapping) else None
        if isinstance(step, bool) or not isinstance(step, int):
            # It may be about any step, so that none of them can be trusted.
            raise UnreadableError("a verdict of the reply does not name its step")
        if step not in numbers:
            raise UnreadableError(f"the reply judges step {step}, which was not asked for", "extra_step")
        entries[step].append(entry)
    return entries


def _reading(entries: Sequence[Mapping[str, Any]], number: int, steps: ScoreSteps) -> Reading:
    if not entries:
        return _missing(f"the reply does not judge step {number}", ("lacking_step",))
    if len(entries) > 1:
        return _missing(f"the reply judges step {number} more than once", ("repeated_step",))
    if "score" not in entries[0]:
        return _missing(f"the reply gives step {number} no score")
    try:
        return read_fields(entries[0], steps)
    except UnreadableError as fault:
        return _missing(f"{fault} (step {number})", fault.alarms)


def _missing(reason: str, alarms: tuple[str, ...] = ()) -> Reading:
    return Reading(score=None, reason=reason, alarms=alarms, ask_again=True)
