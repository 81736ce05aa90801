"""From a coach's reply to a score, or to the reason why there is none. Nothing is repaired, rounded or clamped."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lightning_mappa.coaches.provider import CoachReply

ScoreSteps = Literal["integer", "half", "decimal"]
"""Which scores from 0 to 10 there are."""

MAX_BYTES = 65_536
MAX_DEPTH = 16
MAX_REASON = 400

_NUMBER = r"(?P<score>[0-9]+(?:\.[0-9]+)?)"
_OF_TEN = r"(?:\s*/\s*10|\s+out\s+of\s+10)"
# Not a part of a longer number, of a range, of a fraction of something else than ten, of a percentage.
_END = r"(?![\w%]|[.,][0-9]|\s*[/%\u2013\u2014-]|\s+(?:or|to|out\s+of)\s)"
# Possessive, or a long run of spaces would be tried in every way to share it out.
_MARK = r"[\s*_]*+"
_WHOLE = re.compile(rf"\A{_MARK}{_NUMBER}{_OF_TEN}?{_END}{_MARK}\.?\s*\Z")
_INDENT = r"(?:[^\S\n]++|[*_#-])*+"
_LABEL = rf"{_INDENT}(?:(?:process|final|overall)[ _])?score{_MARK}(?:is|[:=])?{_MARK}\[?{_NUMBER}{_OF_TEN}?{_END}"
_LABELLED = re.compile(rf"^{_LABEL}", re.IGNORECASE | re.MULTILINE)
_LABELLED_LINE = re.compile(rf"{_LABEL}{_MARK}\]?{_MARK}\.?{_MARK}(?:\([^()]*\)\.?)?{_MARK}", re.IGNORECASE)
_FRACTION = re.compile(rf"(?<![\w.,/\u2013\u2014-]){_NUMBER}{_OF_TEN}{_END}", re.IGNORECASE)
_RANGE_BEFORE = re.compile(r"[0-9](?:\s*[\u2013\u2014-]|\s+(?:or|to|and))\s*\Z")
_CODE_FENCE = re.compile(r"```[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)
_QUOTED = re.compile(r"^[^\S\n]*+>.*$|\"[^\"\n]*\"|“[^”\n]*”|`[^`\n]*`", re.MULTILINE)
_CITATION = "\u2026"
"""Stands for what was quoted, so that nothing around it becomes a line of its own."""

_PRAISE = re.compile(r"\b(?:excellent|flawless|perfect|outstanding)\b", re.IGNORECASE)
_BLAME = re.compile(r"\b(?:terrible|useless|worthless|complete failure)\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a reply says."""

    score: float | None
    reason: str
    """One line: the coach's own, or why there is no score. No control characters, at most 400 characters."""
    alarms: tuple[str, ...] = ()
    """What to count: `string_score`, `out_of_range`, `scale_drift`, `contradiction`, `wrong_case`, `refusal`."""
    ask_again: bool = False
    """The same case may be asked once more: the reply, not the case, was at fault."""
    cut: bool = False
    """The token limit cut the reply."""


class UnreadableError(Exception):
    """A reply, or a part of one, without a score; `alarms` are for the `Reading` made of it."""

    def __init__(self, reason: str, alarm: str | None = None) -> None:
        super().__init__(reason)
        self.alarms = () if alarm is None else (alarm,)


def verdict_schema(steps: ScoreSteps) -> dict[str, Any]:
    """The JSON schema of a reply, its reason first so that the score follows from it.

    Scores are an enum, because services drop `minimum` and `maximum`; with `decimal` only the parser bounds them.
    """
    fields = {"case": {"type": "string"}, "reason": {"type": "string"}, "score": _score_schema(steps)}
    return _object(fields)


def batch_schema(steps: ScoreSteps) -> dict[str, Any]:
    """The JSON schema of a reply to several steps. It does not count them, so that all episodes share it."""
    verdict = _object({"step": {"type": "integer"}, "reason": {"type": "string"}, "score": _score_schema(steps)})
    return _object({"case": {"type": "string"}, "verdicts": {"type": "array", "items": verdict}})


def _object(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": dict(fields),
        "required": list(fields),
        "additionalProperties": False,
    }


def _score_schema(steps: ScoreSteps) -> dict[str, Any]:
    kinds: dict[ScoreSteps, dict[str, Any]] = {
        "integer": {"type": "integer", "enum": list(range(11))},
        "half": {"type": "number", "enum": [half / 2 for half in range(21)]},
        "decimal": {"type": "number", "description": "from 0 to 10"},
    }
    return kinds[steps]


def read_reply(reply: CoachReply, *, case: str, steps: ScoreSteps = "integer") -> Reading:
    """Reads strict JSON, and a score in plain text only where the provider does not hold the text to a schema.

    `case` is what the reply has to repeat when it names a case at all. Never raises.
    """
    ended = unfinished(reply)
    if ended is not None:
        return ended
    try:
        return _read(reply.text, structured=reply.structured, case=case, steps=steps)
    except UnreadableError as fault:
        return Reading(score=None, reason=str(fault), alarms=fault.alarms, ask_again=True)


def unfinished(reply: CoachReply) -> Reading | None:
    """What a reply that did not come to its end says."""
    if reply.finish == "refusal":
        detail = f" ({one_line(reply.detail)})" if reply.detail else ""
        return Reading(score=None, reason=f"the coach refused{detail}", alarms=("refusal",))
    if reply.finish == "length":
        return Reading(score=None, reason="the reply was cut at the token limit", ask_again=True, cut=True)
    if reply.finish != "end":
        return Reading(score=None, reason=f"the reply ended with {one_line(reply.finish)!r}")
    return None


def json_of(reply: CoachReply, case: str) -> Any:
    """The JSON of a reply that has to be JSON. Raises `UnreadableError`."""
    stripped = _checked_text(reply.text)
    embedded = [] if reply.structured else _embedded(reply.text)
    return _of_embedded(embedded, case) if embedded else _strict_json(stripped)


def one_line(text: str, limit: int = MAX_REASON) -> str:
    """`text` on one line, without control, format (bidi, BOM) and surrogate characters."""
    spaced = "".join(" " if char.isspace() else char for char in text)
    clean = "".join(char for char in spaced if not unicodedata.category(char).startswith("C"))
    clean = " ".join(clean.split())
    return clean if len(clean) <= limit else clean[: limit - 1] + "…"


def _read(text: str, *, structured: bool, case: str, steps: ScoreSteps) -> Reading:
    stripped = _checked_text(text)
    if structured or stripped.startswith(("{", "[")):
        return _of_json(_strict_json(stripped), case=case, steps=steps)
    embedded = _embedded(text)
    if embedded:
        return _of_json(_of_embedded(embedded, case), case=case, steps=steps)
    if any(unicodedata.category(char).startswith("C") and not char.isspace() for char in text):
        raise UnreadableError("the reply holds control characters")
    score = _plain_score(_QUOTED.sub(_CITATION, _CODE_FENCE.sub(_CITATION, text)))
    return _checked(score, steps=steps, reason=text)


def _checked_text(text: str) -> str:
    if len(text.encode("utf-8", "surrogatepass")) > MAX_BYTES:
        raise UnreadableError(f"the reply is longer than {MAX_BYTES} bytes")
    if not text.strip():
        raise UnreadableError("the reply is empty")
    return text.strip()


def _embedded(text: str) -> list[str]:
    """JSON objects in code fences."""
    return [body for fence in _CODE_FENCE.findall(text) if (body := fence.strip()).startswith("{")]


def _strict_json(text: str) -> Any:
    if _depth(text) > MAX_DEPTH:
        raise UnreadableError(f"the reply is nested deeper than {MAX_DEPTH}")
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except ValueError as error:
        raise UnreadableError("the reply is no valid JSON") from error


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        raise ValueError("a key stands twice")
    return dict(pairs)


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


def _depth(text: str) -> int:
    """An upper bound: brackets inside strings count."""
    depth = deepest = 0
    for char in text:
        if char in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif char in "]}":
            depth -= 1
    return deepest


def _of_json(value: Any, *, case: str, steps: ScoreSteps) -> Reading:
    check_case(value, case, "score")
    return read_fields(value, steps)


def check_case(value: Any, case: str, field: str) -> None:
    """Raises `UnreadableError` for anything but an object with this field about this case."""
    if not isinstance(value, Mapping):
        raise UnreadableError("the reply is JSON, but no object")
    if field not in value:
        raise UnreadableError(f"the reply has no {field}")
    if value.get("case", case) != case:
        raise UnreadableError("the reply is about another case", "wrong_case")


def read_fields(value: Mapping[str, Any], steps: ScoreSteps) -> Reading:
    """The `score` and the `reason` of one object. Raises `UnreadableError`."""
    score, reason = value["score"], value.get("reason")
    alarms: tuple[str, ...] = ()
    if isinstance(score, str) and re.fullmatch("[0-9]{1,9}", score):
        score, alarms = int(score), ("string_score",)
    if isinstance(score, bool) or not isinstance(score, int | float):
        raise UnreadableError("the score is no number")
    return _checked(score, steps=steps, reason=reason if isinstance(reason, str) else "", alarms=alarms)


def _of_embedded(objects: Sequence[str], case: str) -> Mapping[str, Any]:
    """JSON with prose around it counts only if it repeats the case: an agent's text, quoted, cannot know it."""
    if len(objects) > 1:
        raise UnreadableError("the reply holds more than one JSON object")
    value = _strict_json(objects[0])
    if not isinstance(value, Mapping) or value.get("case") != case:
        raise UnreadableError("the JSON in the reply does not name the case", "wrong_case")
    return value


def _plain_score(text: str) -> float:
    """The number that is the whole reply, else the labelled one that is its first or last line.

    A number in a sentence is never a score: it may be what an agent has asked for. A fraction of ten beside the
    labelled score leaves the reply without one.
    """
    whole = _WHOLE.match(text)
    if whole:
        return float(whole["score"])
    found: set[int] = set()
    for pattern in (_LABELLED, _FRACTION):
        for match in pattern.finditer(text):
            if _RANGE_BEFORE.search(text[: match.start("score")]):
                raise UnreadableError("the reply gives a range")
            found.add(match.start("score"))
    if len(found) > 1:
        raise UnreadableError("the reply gives more than one score")
    lines = [line for line in text.split("\n") if line.strip()]
    labelled = _LABELLED_LINE.fullmatch(lines[0]) or _LABELLED_LINE.fullmatch(lines[-1])
    if labelled is None:
        raise UnreadableError("the reply gives no score from 0 to 10 on a line of its own")
    return float(labelled["score"])


def _checked(score: float, *, steps: ScoreSteps, reason: str, alarms: tuple[str, ...] = ()) -> Reading:
    if not 0 <= score <= 10:
        raise UnreadableError("the score is not from 0 to 10", "out_of_range")
    whole, half = float(score).is_integer(), float(score * 2).is_integer()
    if not (whole or (half and steps == "half") or steps == "decimal"):
        alarm = "scale_drift" if score < 1 else None
        raise UnreadableError("the score is no " + ("integer" if steps == "integer" else "multiple of one half"), alarm)
    if 0 < score < 1:
        alarms = (*alarms, "scale_drift")
    if (score >= 8 and _BLAME.search(reason)) or (score <= 2 and _PRAISE.search(reason)):
        alarms = (*alarms, "contradiction")
    return Reading(score=float(score), reason=one_line(reason), alarms=alarms)
