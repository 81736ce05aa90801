"""A coach that needs no model: it scores what can be checked against the task's reference."""

from __future__ import annotations

import re

from lightning_mappa.tasks.expressions import evaluate
from lightning_mappa.tasks.grading import boxed_answer, parse_gold, parse_integer
from lightning_mappa.types import Action, ActionStatus, Episode, EpisodeStatus, StopReason, ToolStatus, Verdict

_NUMBER = re.compile(r"(?:(?<![\d).])-)?\d{1,3}(?:,\d{3})+(?!\d)|(?:(?<![\d).])-)?\d+(?:\.\d+)?")
_PROSE = re.compile(r"[A-Za-z]{2,}|=")
_FORMULA = re.compile(r"(?=.*[\d)]\s*[-+*/])[-+*/() \d]+")
"""Numbers with an operator after one of them; it need not be well formed."""

_NO_REFERENCE = "the task has no reference in integers to check against"


class RulesCoach:
    """Offline, deterministic, free. Blames the action that went wrong, not the one that passed it on.

    What an action is follows from what it did, not from the name of its role:

    | action | score |
    |---|---|
    | nothing generated (prompt too long), or the sandbox failed | missing |
    | wrong in value, and the sandbox of the code that it reports, or was handed the output of, failed | missing |
    | **answers**: last of a complete episode, ran no code | 10 boxes the reference; 8 boxes the wrong \
value it was handed; 1 boxes anything else; 0 boxes nothing |
    | has a tool, wrote no code | 0 |
    | **codes**: ran code | 10 prints the reference; 8 prints the wrong value it was handed; 7 could not do \
better, what it was handed has no value; 2 prints another number; 1 prints none, or fails |
    | **reports**: follows its own code | 10 states the output, be it beside a value it was handed; 9 states the \
reference instead; 8 states no number where there was none; 1 otherwise |
    | **solves**: any other; hands on an expression, or prose whose last number is its result | 10 the reference; \
8 the wrong value it was handed; 2 another value; 1 no value, so that saying nothing never beats trying |

    Prose whose last line is an expression comes to its value. Prose that was cut at the token limit has no value
    but what it has boxed. An action is handed the last text of the agent before it, and that agent's last tool
    output. Where the task has no reference, every line that needs it is a missing verdict.
    """

    name = "rules"

    async def score(self, episode: Episode, index: int) -> Verdict:
        score, reason = judge(episode, index)
        nothing = score is None and reason != _NO_REFERENCE  # which is the choice of coach and task
        return Verdict(score=score, reason=reason, coach=self.name, unjudgeable=nothing)


Judgement = tuple[float | None, str]


def judge(episode: Episode, index: int) -> Judgement:
    """Score and one-line reason for `episode.actions[index]`, as the table of `RulesCoach` has it."""
    action = episode.actions[index]
    if action.status is ActionStatus.PROMPT_TOO_LONG:
        return None, "the prompt did not fit the context: nothing was generated"
    if _sandbox_failed(action):
        return None, "the sandbox failed, which says nothing of the program"

    gold = _gold(episode.task.reference)
    before = episode.actions[index - 1] if index else None
    given = _handed(episode, index)
    answers = index == len(episode.actions) - 1 and episode.status is EpisodeStatus.OK
    if action.tool_results:
        return _judge_code(action, gold, given)
    if answers:
        return _judge_answer(action, gold, given)
    if action.status is ActionStatus.NO_CODE:
        return 0.0, "wrote no code to run"
    if before is not None and before.agent_id == action.agent_id and before.tool_results:
        return _judge_report(action, gold, given, before)
    return _judge_solution(action, gold, given)


def text_value(text: str) -> int | None:
    """The integer that a text comes to: its last box, its value as an expression, or in prose its last number.

    An expression that stands alone on the last line of prose counts as a whole.
    """
    boxed = boxed_answer(text)
    if boxed is not None:
        return parse_integer(boxed)
    last_line = text.strip().rpartition("\n")[2].strip(" .$")
    if _is_prose(text) and not _FORMULA.fullmatch(last_line):
        return _last_integer(text)
    try:
        return evaluate(last_line if _is_prose(text) else text.strip(" .$\n"))
    except ValueError:
        return None


def stated_value(action: Action) -> int | None:
    """What the action's text comes to; None where its prose was cut, since its last number is then any number."""
    cut = action.stop_reason is StopReason.LENGTH and boxed_answer(action.text) is None
    return None if cut and _is_prose(action.text) else text_value(action.text)


def output_value(action: Action) -> int | None:
    """The last number that the action's last program printed; None if it failed or printed none."""
    last = action.tool_results[-1]
    return _last_integer(last.stdout) if last.ok else None


class _Handed:
    """What one agent left to the next; its last code, if it ran any, may be one of which the sandbox failed."""

    def __init__(self, action: Action, code: Action | None) -> None:
        output = None if code is None else output_value(code)
        self.broken = code is not None and _sandbox_failed(code)
        self.text = action.text.strip()
        self.value = output if action.tool_results else stated_value(action)
        self.values = {value for value in (self.value, output) if value is not None}

    @property
    def hopeless(self) -> bool:
        """Neither a value nor a text that one could work from."""
        return not self.values and not _is_prose(self.text)


def _handed(episode: Episode, index: int) -> _Handed | None:
    agent_id = episode.actions[index].agent_id
    earlier = [action for action in episode.actions[:index] if action.agent_id != agent_id]
    if not earlier:
        return None
    last = earlier[-1]
    codes = [action for action in earlier if action.agent_id == last.agent_id and action.tool_results]
    return _Handed(last, codes[-1] if codes else None)


def _sandbox_failed(action: Action) -> bool:
    return any(result.status is ToolStatus.SANDBOX_ERROR for result in action.tool_results)


def _wrong(score: float, reason: str, given: _Handed | None) -> Judgement:
    """The score, unless it was handed nothing because a sandbox failed."""
    if given is not None and given.broken:
        return None, f"{reason}; but the sandbox failed of the code whose output it was to be handed"
    return score, reason


def _judge_code(action: Action, gold: frozenset[int] | None, given: _Handed | None) -> Judgement:
    last = action.tool_results[-1]
    hopeless = given is not None and given.hopeless
    value = output_value(action)
    if value is None and hopeless:
        return 7.0, "nothing printed, but what it was handed has no value"
    if not last.ok:
        return 1.0, f"the code ended with {last.status}"
    if value is None:
        return 1.0, "the code printed no number"
    if gold is None:
        return None, _NO_REFERENCE
    if value in gold:
        return 10.0, f"the code printed {value}, the reference"
    if given is not None and value in given.values:
        return 8.0, f"the code printed {value}: wrong, but the value it was handed"
    if hopeless:
        return 7.0, f"the code printed {value}: wrong, but what it was handed has no value"
    return _wrong(2.0, f"the code printed {value}, neither the reference nor what it was handed", given)


def _judge_report(action: Action, gold: frozenset[int] | None, given: _Handed | None, code: Action) -> Judgement:
    value, output = stated_value(action), output_value(code)
    if value is None and output is None:
        return 8.0, "the code gave no number, and none is stated"
    if value == output:
        return 10.0, f"states {value}, the output of its code"
    if output is not None and given is not None and value in given.values and output in _integers(action.text):
        return 10.0, f"states {output}, the output of its code, beside {value}, which it was handed"
    if gold is not None and value in gold:
        return 9.0, f"states {value}, the reference, against its output {output}"
    if _sandbox_failed(code):
        return None, f"states {_shown(value)} where the sandbox of its code failed"
    return 1.0, f"states {_shown(value)} where its code gave {_shown(output)}"


def _judge_answer(action: Action, gold: frozenset[int] | None, given: _Handed | None) -> Judgement:
    boxed = boxed_answer(action.text)
    if boxed is None:
        return 0.0, "boxes no answer"
    if gold is None:
        return None, _NO_REFERENCE
    value = parse_integer(boxed)
    if value in gold:
        return 10.0, f"boxes {value}, the reference"
    if given is None:
        return 1.0, f"boxes {boxed[:40]!r}, which is wrong"
    if given.value in gold:
        return 1.0, f"boxes {boxed[:40]!r} though it was handed {given.value}, the reference"
    if boxed == given.text or (value is not None and value in given.values):
        return 8.0, f"boxes {boxed[:40]!r}: wrong, but what it was handed"
    return _wrong(1.0, f"boxes {boxed[:40]!r}, neither the reference nor what it was handed", given)


def _judge_solution(action: Action, gold: frozenset[int] | None, given: _Handed | None) -> Judgement:
    value = stated_value(action)
    if value is None:
        return 1.0, "hands on something that comes to no number"
    if gold is None:
        return None, _NO_REFERENCE
    if value in gold:
        return 10.0, f"comes to {value}, the reference"
    if given is not None and value in given.values:
        return 8.0, f"comes to {value}: wrong, but what it was handed"
    return _wrong(2.0, f"comes to {value}, which is wrong", given)


def _gold(reference: str | None) -> frozenset[int] | None:
    if reference is None:
        return None
    try:
        return parse_gold(reference)
    except ValueError:
        return None


def _is_prose(text: str) -> bool:
    return _PROSE.search(text) is not None


def _last_integer(text: str) -> int | None:
    integers = _integers(text)
    return integers[-1] if integers else None


def _integers(text: str) -> list[int | None]:
    """The numbers in a text, in order; None for one that is not whole."""
    split = (number.replace(",", "").partition(".") for number in _NUMBER.findall(text))
    return [None if decimals.strip("0") else parse_integer(whole) for whole, _, decimals in split]


def _shown(value: int | None) -> str:
    return "no number" if value is None else str(value)
