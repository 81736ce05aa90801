"""Demonstrations of the MathChat roles, with deliberate faults, for the warm start of the tiny model.

A fault is one fixed alternative to the right answer, drawn for each action on its own. A model trained on
the mixture holds the right way and a few wrong ones, and what follows a fault is faithful to it: training
on rewards then has something to choose between.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files

from omegaconf import DictConfig, OmegaConf
from transformers import BatchEncoding, PreTrainedTokenizerFast

from lightning_mappa.tasks.arithmetic import BANDS, Problem, word_problem
from lightning_mappa.tasks.expressions import evaluate
from lightning_mappa.tools.code_blocks import code_blocks
from lightning_mappa.types import Task, ToolResult, ToolStatus
from lightning_mappa.workflows.base import Message
from lightning_mappa.workflows.prompts import PromptTemplate, observation, user_prompt

Chat = list[dict[str, str]]
"""Messages with `role` and `content`, as chat templates take them."""

ROLES = ("solver", "executor", "verifier", "single")
_OPPOSITE = {"+": "-", "-": "+", "*": "+", "//": "*"}


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultRates:
    """Share of actions with each fault; at most one fault per action."""

    solver_operator: float = 0.28
    """The last operator is the wrong one."""
    solver_number: float = 0.18
    """The last number ends with the wrong digit."""
    code_operator: float = 0.16
    code_bare: float = 0.12
    """No print: the program says nothing."""
    code_syntax: float = 0.08
    """The last parenthesis is missing."""
    report_digit: float = 0.3
    """Reports the output with a wrong last digit."""
    verifier_unboxed: float = 0.2
    verifier_digit: float = 0.22


NO_FAULTS = FaultRates(
    solver_operator=0,
    solver_number=0,
    code_operator=0,
    code_bare=0,
    code_syntax=0,
    report_digit=0,
    verifier_unboxed=0,
    verifier_digit=0,
)


class BriefPrompts:
    """The templates of `conf/prompts/brief.yaml`, rendered as the workflows render them."""

    def __init__(self) -> None:
        source = files("lightning_mappa.conf") / "prompts" / "brief.yaml"
        config = OmegaConf.create(source.read_text(encoding="utf-8"))
        assert isinstance(config, DictConfig)
        self._system = {role: config[role].system for role in ROLES}
        self._user = {
            role: PromptTemplate(config[role].user, agent_id=role, key=f"prompts.{role}.user") for role in ROLES
        }
        self._observation = PromptTemplate(config.observation, agent_id="executor", key="prompts.observation")
        self.max_new_tokens: Mapping[str, int] = config.max_new_tokens

    def opening(self, role: str, problem: str, seen: Sequence[Message] = ()) -> Chat:
        """What an agent reads before its first turn."""
        asked = user_prompt(self._user[role], Task(id="", kind="", prompt=problem), seen, {})
        system = [{"role": "system", "content": self._system[role]}] if self._system[role] else []
        return [*system, {"role": "user", "content": asked}]

    def observation(self, result: ToolResult) -> dict[str, str]:
        """What an agent reads after its code has run."""
        return {"role": "tool", "content": observation([result], self._observation)}


def run_code(text: str) -> ToolResult:
    """What Python would say to a fenced program that prints or just states one integer expression."""
    source = "\n".join(code_blocks(text)).strip()
    printed = re.fullmatch(r"print\((.*)\)", source)
    try:
        value = evaluate(printed.group(1) if printed else source)
    except ValueError as error:
        return ToolResult(status=ToolStatus.NONZERO, stderr=str(error), exit_code=1)
    return ToolResult(status=ToolStatus.OK, stdout=f"{value}\n" if printed else "", exit_code=0)


def demonstrate(problem: Problem, rates: FaultRates, rng: random.Random, prompts: BriefPrompts) -> list[Chat]:
    """One chat per role, in the order of `ROLES`: a whole MathChat episode, and the single agent's answer."""
    expression = _solve(problem.expression, rates, rng)
    solver = [*prompts.opening("solver", problem.text), _says(expression)]

    handed = Message(agent_id="solver", role="Problem Solver", text=expression)
    code = _code(expression, rates, rng)
    observed = prompts.observation(run_code(code))
    report = observed["content"]
    if rng.random() < rates.report_digit:
        report = wrong_digit(report)
    executor = [
        *prompts.opening("executor", problem.text, [handed]),
        _says(code),
        observed,
        _says(report),
    ]

    handed = Message(agent_id="executor", role="Code Executor", text=report)
    verifier = [*prompts.opening("verifier", problem.text, [handed]), _says(_verify(report, rates, rng))]
    single = [*prompts.opening("single", problem.text), _says(rf"\boxed{{{problem.value}}}")]
    return [solver, executor, verifier, single]


def chat_ids(
    chats: Sequence[Chat], tokenizer: PreTrainedTokenizerFast, *, generation_prompt: bool = False
) -> list[list[int]]:
    """Token ids of whole chats, as the tokenizer's template writes them."""
    encoded = tokenizer.apply_chat_template(list(chats), add_generation_prompt=generation_prompt)
    assert isinstance(encoded, BatchEncoding)
    return list(encoded["input_ids"])


def training_problem(rng: random.Random) -> Problem:
    """A problem that no selection or report split can hold."""
    while True:
        problem = word_problem(rng, rng.choice(BANDS))
        if problem.split == "train":
            return problem


def wrong_operator(expression: str) -> str:
    """The last operator replaced by another one: `(12+7)*3` becomes `(12+7)+3`."""
    *_, last = re.finditer(r"//|[-+*]", expression)
    return expression[: last.start()] + _OPPOSITE[last.group()] + expression[last.end() :]


def wrong_digit(text: str) -> str:
    """The last digit replaced by the next one, never by 0; text without a digit stays."""
    return re.sub(r"\d(?=\D*$)", lambda digit: str(int(digit.group()) % 9 + 1), text)


def _solve(expression: str, rates: FaultRates, rng: random.Random) -> str:
    draw = rng.random()
    if draw < rates.solver_operator:
        return wrong_operator(expression)
    if draw < rates.solver_operator + rates.solver_number:
        return wrong_digit(expression)
    return expression


def _code(expression: str, rates: FaultRates, rng: random.Random) -> str:
    kinds = ["operator", "bare", "syntax", "right"]
    shares = [rates.code_operator, rates.code_bare, rates.code_syntax]
    kind = rng.choices(kinds, [*shares, 1 - sum(shares)])[0]
    if kind == "operator":
        expression = wrong_operator(expression)
    line = {"bare": expression, "syntax": f"print({expression}"}.get(kind, f"print({expression})")
    return f"```python\n{line}\n```"


def _verify(report: str, rates: FaultRates, rng: random.Random) -> str:
    draw = rng.random()
    if draw < rates.verifier_unboxed:
        return report
    if draw < rates.verifier_unboxed + rates.verifier_digit:
        report = wrong_digit(report)
    return rf"\boxed{{{report}}}"


def _says(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}
