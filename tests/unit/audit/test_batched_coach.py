"""One audit per way of asking: their reports show figures and calls of both."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

from lightning_mappa.audit.audit import audit_coach
from lightning_mappa.audit.planted import make_cases
from lightning_mappa.coaches.guard import BudgetGuard
from lightning_mappa.coaches.llm import LLMCoach
from lightning_mappa.coaches.provider import CoachReply, CoachRequest, Usage


class Sevens:
    """Answers single cases and batches, and gives a seven to all."""

    model = "sevens"

    async def check(self) -> None: ...

    async def ask(self, request: CoachRequest, timeout_s: float) -> CoachReply:
        listed = re.search(r"Judge these steps, each by itself: ([0-9, ]+)", request.question)
        case = re.search(r"Case ([0-9a-f]{16})", request.question)
        assert case is not None
        reply: dict[str, Any] = {"case": case[1], "score": 7}
        if listed:
            reply = {"case": case[1], "verdicts": [{"step": int(n), "score": 7} for n in listed[1].split(", ")]}
        return CoachReply(text=json.dumps(reply), finish="end", usage=Usage(), model=self.model, structured=True)

    async def close(self) -> None: ...


def report(batched: bool) -> dict[str, Any]:
    coach = LLMCoach(Sevens(), batched=batched, guard=BudgetGuard(model="sevens"))
    try:
        return asyncio.run(audit_coach(coach, make_cases(0, 28), seed=0))
    finally:
        coach.close()


def test_an_audit_of_a_batched_coach_gives_the_same_figures_for_fewer_calls():
    cases = make_cases(0, 28)
    single, batched = report(False), report(True)
    assert single["figures"] == batched["figures"]
    assert single["findings"] == batched["findings"] == ["constant", "misses_the_guilty"]
    assert batched["missing_rate"] == 0
    faulty = sum(bool(case.faults) for case in cases)
    actions = sum(len(case.episode.actions) for case in cases)
    assert single["accounts"]["calls"] == 2 * actions + 2 * faulty
    assert batched["accounts"]["calls"] == 2 * len(cases) + 2 * faulty
