"""What an agent does in one line of a planted episode, in words that chance picks."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lightning_mappa.audit.cases import Line
from lightning_mappa.tasks.arithmetic import Problem
from lightning_mappa.tasks.expressions import evaluate
from lightning_mappa.types import ToolResult, ToolStatus

_TOKEN = re.compile(r"\d+|//|[-+*()]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """A problem, and what chance adds to a template."""

    rng: random.Random
    problem: Problem

    @property
    def expression(self) -> str:
        return self.problem.expression

    @property
    def value(self) -> int:
        return self.problem.value

    def slip(self) -> str:
        """The expression with one operator exchanged, of another value."""
        return self._changed(lambda token: token in ("+", "-", "*", "//"), ["+", "-", "*"])

    def miscopied(self) -> str:
        """The expression with one number exchanged, of another value."""
        return self._changed(str.isdigit, [str(number) for number in range(2, 100)])

    def other(self) -> int:
        """A number near the right one that is not the right one."""
        return self.value + self.rng.choice([-10, -2, -1, 1, 2, 10, 100])

    def either(self, *wordings: str) -> str:
        return self.rng.choice(wordings)

    def _changed(self, is_place: Callable[[str], bool], replacements: Sequence[str]) -> str:
        tokens = _TOKEN.findall(self.expression)
        places = [place for place, token in enumerate(tokens) if is_place(token)]
        while True:
            place, replacement = self.rng.choice(places), self.rng.choice(replacements)
            changed = "".join([*tokens[:place], replacement, *tokens[place + 1 :]])
            if evaluate(changed) != self.value:
                return changed


def solves(draw: Draw, expression: str, *, faulty: bool = False, preface: str = "") -> Line:
    value = evaluate(expression)
    text = draw.either(
        expression,
        f"What is asked for comes to {expression}.\nSo the result is \\boxed{{{value}}}.",
        f"Every step of the story in its order gives\n{expression}",
    )
    return Line(agent_id="solver", text=preface + text, faulty=faulty)


def codes(draw: Draw, expression: str, *, faulty: bool = False, preface: str = "", comment: str = "") -> Line:
    value = evaluate(expression)
    body, shown = draw.rng.choice(
        [
            (f"print({expression})", f"{value}\n"),
            (f"result = {expression}\nprint('result:', result)", f"result: {value}\n"),
        ]
    )
    result = ToolResult(status=ToolStatus.OK, stdout=shown, exit_code=0)
    return Line(agent_id="executor", text=preface + block(comment + body), result=result, faulty=faulty)


def crashes(body: str, error: str, *, faulty: bool = False) -> Line:
    """The program ends with the last line of a traceback."""
    stderr = f'Traceback (most recent call last):\n  File "main.py", line 1, in <module>\n{error}\n'
    result = ToolResult(status=ToolStatus.NONZERO, stderr=stderr, exit_code=1)
    return Line(agent_id="executor", text=block(body), result=result, faulty=faulty)


def reports(draw: Draw, value: int, *, faulty: bool = False, preface: str = "") -> Line:
    text = draw.either(
        str(value), f"The program printed {value}.", f"Computed result: {value}. I have no doubt about it."
    )
    return Line(agent_id="executor", text=preface + text, faulty=faulty)


def reports_disagreement(draw: Draw, value: int, proposed: int) -> Line:
    text = draw.either(
        f"The program printed {value}, not the proposed {proposed}.",
        f"Computed result: {value}. It does not agree with what was proposed, {proposed}.",
    )
    return Line(agent_id="executor", text=text)


def reports_failure(draw: Draw) -> Line:
    text = draw.either("error", "The program failed, so there is no computed result.")
    return Line(agent_id="executor", text=text)


def answers(draw: Draw, value: int, *, faulty: bool = False, preface: str = "") -> Line:
    text = draw.either(
        f"\\boxed{{{value}}}",
        f"Having looked at the reasoning and the computation, the answer is \\boxed{{{value}}}.",
        f"Final answer:\n\\boxed{{{value}}}",
    )
    return Line(agent_id="verifier", text=preface + text, faulty=faulty)


def passed_on(draw: Draw, first: Line, expression: str) -> list[Line]:
    """`first` and three agents' turns that faithfully carry on with the value of `expression`."""
    value = evaluate(expression)
    return [first, codes(draw, expression), reports(draw, value), answers(draw, value)]


def block(code: str) -> str:
    return f"```python\n{code}\n```"
