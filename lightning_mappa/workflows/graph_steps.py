"""The steps of `graph.GraphWorkflow`, read from YAML and checked before a run starts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_mappa.errors import ConfigError
from lightning_mappa.workflows.base import Message

KINDS: Mapping[str, tuple[str, ...]] = {
    "act": ("reads",),
    "together": (),
    "repeat": ("steps", "until"),
    "route": ("cases", "otherwise"),
}
"""What a step may be -> its other keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Act:
    agent: str
    reads: str | tuple[str, ...]
    """`all`, `last`, or agents."""

    def seen(self, said: Sequence[Message]) -> tuple[Message, ...]:
        """In the order in which it was said; never what the agent said itself."""
        others = [message for message in said if message.agent_id != self.agent]
        if self.reads == "all":
            return tuple(others)
        if self.reads == "last":
            return tuple(others[-1:])
        last = {message.agent_id: place for place, message in enumerate(others)}
        return tuple(others[place] for place in sorted(last[name] for name in self.reads if name in last))


@dataclass(frozen=True, slots=True, kw_only=True)
class Together:
    steps: tuple[Act, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeat:
    rounds: int
    steps: tuple[Step, ...]
    until: tuple[str, re.Pattern[str]] | None

    def ends(self, said: Sequence[Message]) -> bool:
        """`said` since the loop began."""
        if self.until is None:
            return False
        agent, pattern = self.until
        texts = [message.text for message in said if message.agent_id == agent]
        return bool(texts) and pattern.search(texts[-1]) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    agent: str
    cases: tuple[tuple[re.Pattern[str], tuple[Step, ...]], ...]
    otherwise: tuple[Step, ...]

    def choose(self, said: Sequence[Message]) -> tuple[Step, ...]:
        texts = [message.text for message in said if message.agent_id == self.agent]
        for pattern, steps in self.cases if texts else ():
            if pattern.search(texts[-1]) is not None:
                return steps
        return self.otherwise


Step = Act | Together | Repeat | Route


def agents_of(steps: Sequence[Step]) -> Iterator[str]:
    """Whoever may act, in the order of the steps; again where they act again."""
    for step in steps:
        match step:
            case Act():
                yield step.agent
            case Together() | Repeat():
                yield from agents_of(step.steps)
            case Route():
                for _, inner in step.cases:
                    yield from agents_of(inner)
                yield from agents_of(step.otherwise)


def parse_topology(nodes: object, key: str) -> tuple[Step, ...]:
    """Raises `ConfigError` with the place of what is wrong; `key` is where the list stands in the config."""
    steps = _steps(nodes, key)
    acting = set(agents_of(steps))
    for agent, where in _listened_to(steps, key):
        if agent not in acting:
            raise ConfigError(f"{where}={agent}: that agent never acts; allowed are {', '.join(sorted(acting))}")
    return steps


def _steps(nodes: object, key: str) -> tuple[Step, ...]:
    if not isinstance(nodes, Sequence) or isinstance(nodes, str) or not nodes:
        raise ConfigError(f"{key}={nodes!r}: give a list of at least one step")
    return tuple(_step(node, f"{key}[{place}]") for place, node in enumerate(nodes))


def _step(node: object, key: str) -> Step:
    if not isinstance(node, Mapping):
        raise ConfigError(f"{key}={node!r}: a step is a mapping with one of {', '.join(KINDS)}")
    kinds = [kind for kind in KINDS if kind in node]
    if len(kinds) != 1:
        raise ConfigError(f"{key} has {' and '.join(kinds) or 'none'} of {', '.join(KINDS)}; allowed is one")
    kind = kinds[0]
    unknown = [str(name) for name in node if name != kind and name not in KINDS[kind]]
    if unknown:
        allowed = ", ".join(KINDS[kind]) or "nothing else"
        raise ConfigError(f"{key}.{unknown[0]} is no key of a step with {kind}; allowed beside it: {allowed}")
    return _READERS[kind](node, key)


def _act(node: Mapping[Any, Any], key: str) -> Act:
    reads = node.get("reads", "all")
    if isinstance(reads, Sequence) and not isinstance(reads, str):
        return Act(agent=_name(node["act"], f"{key}.act"), reads=tuple(_name(n, f"{key}.reads") for n in reads))
    if reads not in ("all", "last"):
        raise ConfigError(f"{key}.reads={reads!r}: allowed are all, last or a list of agents")
    return Act(agent=_name(node["act"], f"{key}.act"), reads=reads)


def _together(node: Mapping[Any, Any], key: str) -> Together:
    steps = _steps(node["together"], f"{key}.together")
    acts = [step for step in steps if isinstance(step, Act)]
    names = [act.agent for act in acts]
    if len(acts) != len(steps) or len(set(names)) != len(names):
        raise ConfigError(f"{key}.together: allowed are steps with act, of each agent one")
    return Together(steps=tuple(acts))


def _repeat(node: Mapping[Any, Any], key: str) -> Repeat:
    rounds = node["repeat"]
    if isinstance(rounds, bool) or not isinstance(rounds, int) or rounds < 1:
        raise ConfigError(f"{key}.repeat={rounds!r}: give a number of rounds of at least 1")
    until, rule = node.get("until"), None
    if until is not None:
        if not isinstance(until, Mapping) or set(until) != {"agent", "says"}:
            raise ConfigError(f"{key}.until={until!r}: give agent and says, a regular expression")
        rule = _name(until["agent"], f"{key}.until.agent"), _pattern(until["says"], f"{key}.until.says")
    return Repeat(rounds=rounds, steps=_steps(node.get("steps"), f"{key}.steps"), until=rule)


def _route(node: Mapping[Any, Any], key: str) -> Route:
    cases = node.get("cases")
    if not isinstance(cases, Sequence) or isinstance(cases, str) or not cases:
        raise ConfigError(f"{key}.cases={cases!r}: give a list of says and steps")
    read = []
    for place, case in enumerate(cases):
        where = f"{key}.cases[{place}]"
        if not isinstance(case, Mapping) or set(case) != {"says", "steps"}:
            raise ConfigError(f"{where}={case!r}: give says, a regular expression, and steps")
        read.append((_pattern(case["says"], f"{where}.says"), _steps(case["steps"], f"{where}.steps")))
    return Route(
        agent=_name(node["route"], f"{key}.route"),
        cases=tuple(read),
        otherwise=_steps(node.get("otherwise"), f"{key}.otherwise"),
    )


def _listened_to(steps: Sequence[Step], key: str) -> Iterator[tuple[str, str]]:
    """Agents whose words decide or are read, with the place that names them."""
    for place, step in enumerate(steps):
        where = f"{key}[{place}]"
        match step:
            case Act(reads=tuple() as names):
                yield from ((name, f"{where}.reads") for name in names)
            case Together():
                yield from _listened_to(step.steps, f"{where}.together")
            case Repeat():
                if step.until is not None:
                    yield step.until[0], f"{where}.until.agent"
                yield from _listened_to(step.steps, f"{where}.steps")
            case Route():
                yield step.agent, f"{where}.route"
                for number, (_, inner) in enumerate(step.cases):
                    yield from _listened_to(inner, f"{where}.cases[{number}].steps")
                yield from _listened_to(step.otherwise, f"{where}.otherwise")


def _name(value: object, key: str) -> str:
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{key}={value!r}: give the name of an agent")
    return value


def _pattern(value: object, key: str) -> re.Pattern[str]:
    try:
        return re.compile(str(value))
    except re.error as error:
        raise ConfigError(f"{key}={value!r} is no regular expression: {error}") from error


_READERS: Mapping[str, Callable[[Mapping[Any, Any], str], Step]] = {
    "act": _act,
    "together": _together,
    "repeat": _repeat,
    "route": _route,
}
