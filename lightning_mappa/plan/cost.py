"""Coach calls of a run and what they may cost, from the coach's own config."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_mappa.coaches.pricing import Prices
from lightning_mappa.coaches.provider import Usage

CHARS_PER_TOKEN = 3
"""Usual for prose and code; numbers and scripts other than Latin have fewer."""
RUBRIC_TOKENS = 2_500
"""Rubric, rules, schema and what stands between them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedActions:
    """Actions of one agent over the whole run, those in evaluations only where they are scored."""

    count: int
    max_new_tokens: int
    with_tools: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CoachBill:
    """One model that is asked."""

    model: str
    calls: int
    """At most, without what is asked a second time: replies that cannot be read, transport faults."""
    input_tokens: int
    output_tokens: int
    usd: float | None
    """At about the most; None where no price is given."""
    budget_usd: float | None
    """The cap that ends the run; None is none."""


def coach_bills(coach: Mapping[str, Any], actions: Sequence[JudgedActions], task_tokens: int) -> list[CoachBill]:
    """Of every model in a coach and in the coaches around it; none for coaches that ask no model."""
    return [_bill(node, times, actions, task_tokens) for node, times in _asking(coach, 1)]


def _asking(node: Any, times: int) -> Iterator[tuple[Mapping[str, Any], int]]:
    """Nodes with a provider, and how often each is asked about one action."""
    if isinstance(node, Mapping):
        times *= node.get("samples") or 1
        if "provider" in node:
            yield node, times
            return
        for inner in node.values():
            yield from _asking(inner, times)
    elif isinstance(node, Sequence) and not isinstance(node, str):
        for inner in node:
            yield from _asking(inner, times)


def _bill(node: Mapping[str, Any], times: int, actions: Sequence[JudgedActions], task_tokens: int) -> CoachBill:
    model = str(node["provider"].get("model"))
    guard = node.get("guard") or {}
    listed = (guard.get("prices") or {}).get(model)
    prices = None if listed is None else Prices.of(listed)
    longest = int(node.get("max_chars") or 24_000) // CHARS_PER_TOKEN
    output = int(node.get("max_tokens") or 2048)
    calls = inputs = 0
    usd = 0.0
    for agent in actions:
        # Of the action in full, the task, what it was asked and did before (a sixth each), tool outputs (a third).
        asked = RUBRIC_TOKENS + min(longest, agent.max_new_tokens) + min(longest, task_tokens) + longest // 3
        asked += longest // 3 if agent.with_tools else 0
        calls += times * agent.count
        inputs += times * agent.count * asked
        if prices is not None:
            one = prices.cost(Usage(input_tokens=asked, output_tokens=output))
            usd += float(one * times * agent.count)
    return CoachBill(
        model=model,
        calls=calls,
        input_tokens=inputs,
        output_tokens=calls * output,
        usd=None if prices is None else usd,
        budget_usd=guard.get("budget_usd"),
    )
