"""What is done to a coach made of others is done to each of them."""

from __future__ import annotations

import asyncio
import math

import pytest

from lightning_mappa.coaches.base import (
    accounts,
    bind_accounts,
    coach_state,
    end_batch,
    learns_from_batches,
    load_coach_state,
    needs_outcome,
    rescored,
    with_parts,
)
from lightning_mappa.coaches.caps import CappedCoach
from lightning_mappa.coaches.cascade import CascadeCoach
from lightning_mappa.coaches.ensemble import EnsembleCoach
from lightning_mappa.coaches.llm import LLMCoach
from lightning_mappa.coaches.rules import RulesCoach
from lightning_mappa.coaches.shuffled import ShuffledCoach
from lightning_mappa.coaches.stateful import CalibratedCoach
from lightning_mappa.system import Environment
from lightning_mappa.testing import ScriptedCoach
from lightning_mappa.types import Verdict
from tests.unit.coaches.conftest import make_episode
from tests.unit.coaches.test_llm import _InstantProvider
from tests.unit.factories import make_action


class Paid:
    """Has all that a coach may have."""

    name = "paid"

    def __init__(self, usd=0.5, needs_outcome=True):
        self.needs_outcome = needs_outcome
        self.usd = usd
        self.calls = self.batches = self.closed = 0
        self.folder = None

    async def score(self, episode, index):
        self.calls += 1
        return Verdict(score=5.0, reason="paid", coach=self.name)

    def bind(self, folder):
        self.folder = folder

    def summary(self):
        return {"calls": self.calls, "usd": self.usd, "failed": 1}

    def state_dict(self):
        return {"calls": self.calls}

    def load_state_dict(self, state):
        self.calls = state["calls"]

    def end_of_batch(self):
        self.batches += 1

    def close(self):
        self.closed += 1


@pytest.mark.parametrize("around", [CappedCoach, CalibratedCoach, ShuffledCoach, lambda coach: EnsembleCoach([coach])])
def test_around_one_coach(around, tmp_path):
    paid = Paid()
    coach = around(paid)
    asyncio.run(coach.score(make_episode(), 0))
    bind_accounts(coach, tmp_path)
    assert paid.folder == tmp_path
    assert dict(accounts(coach)) == {"calls": 1, "usd": 0.5, "failed": 1}
    end_batch(coach)
    assert paid.batches == 1
    fresh = Paid()
    load_coach_state(around(fresh), coach_state(coach))
    assert fresh.calls == 1
    Environment(workflow=None, source=None, coach=coach, tools={}).close()
    assert paid.closed == 1


def test_several_have_folders_of_their_own_and_sums(tmp_path):
    first, second = Paid(0.25), Paid(0.5)
    coach = CascadeCoach([RulesCoach(), CappedCoach(first), EnsembleCoach([second], samples=3)])
    asyncio.run(coach.score(make_episode(), 0))
    bind_accounts(coach, tmp_path)
    assert (first.folder, second.folder) == (tmp_path / "coach_1", tmp_path / "coach_2")
    figures = accounts(coach)
    assert (figures["calls"], figures["usd"], len(figures["coaches"])) == (first.calls + second.calls, 0.75, 2)
    assert accounts(EnsembleCoach([Paid(0.25), Paid(None)]))["usd"] is None
    assert accounts(EnsembleCoach([RulesCoach()])) == {}


def test_one_that_is_asked_three_times_is_one_coach():
    paid = Paid()
    coach = EnsembleCoach([paid], samples=3)
    assert asyncio.run(coach.score(make_episode(), 0)).reason.startswith("mean of 3")
    end_batch(coach)
    assert (paid.calls, paid.batches) == (3, 1)
    assert list(with_parts(coach)) == [coach, paid]
    assert accounts(coach)["calls"] == 3


def test_the_outcome_is_awaited_where_a_part_needs_it():
    early, late = Paid(needs_outcome=False), Paid()

    def waits(coach):
        return needs_outcome(coach, make_action(), None)

    assert not waits(EnsembleCoach([early, early]))
    assert not waits(CalibratedCoach(early))
    assert waits(EnsembleCoach([early, late]))
    assert waits(CascadeCoach([early, RulesCoach()]))
    assert waits(CappedCoach(early))
    assert waits(ShuffledCoach(early))


@pytest.mark.parametrize(
    ("show_reference", "waits"),
    [
        ("none", {("verifier", "verifier"): False, ("solver", "verifier"): False, ("solver", None): False}),
        ("last", {("verifier", "verifier"): True, ("solver", "verifier"): False, ("solver", None): False}),
        ("all", {("verifier", "verifier"): True, ("solver", "verifier"): True, ("solver", None): True}),
    ],
)
def test_a_model_waits_for_the_outcome_only_where_it_is_shown_it(show_reference, waits):
    class NeverAsked:
        model = "m"

    coach = EnsembleCoach([LLMCoach(NeverAsked(), show_reference=show_reference)])
    for (agent_id, last_agent_id), expected in waits.items():
        assert needs_outcome(coach, make_action(agent_id=agent_id), last_agent_id) is expected


@pytest.mark.parametrize("off", [12.0, -1.0, math.nan])
def test_a_part_that_is_off_the_scale_gives_nothing(off):
    wild, seven = ScriptedCoach(lambda e, i: off, name="wild"), ScriptedCoach(lambda e, i: 7.0)
    coaches = [EnsembleCoach([wild, seven]), CascadeCoach([wild, seven], accept=[[0, 10]])]
    for coach in coaches:
        assert asyncio.run(coach.score(make_episode(), 0)).score == 7
    for around in (CappedCoach, CalibratedCoach, ShuffledCoach):
        verdict = asyncio.run(around(wild).score(make_episode(), 0))
        assert verdict == Verdict(score=None, reason=f"the coach gave {off:g}, which is not in 0 … 10", coach="wild")


def test_rescored_keeps_the_first_score():
    given = Verdict(score=8.0, reason="r", coach="c")
    once = rescored(given, 6.0, "down")
    assert once == Verdict(score=6.0, reason="down", coach="c", raw_score=8.0)
    assert rescored(once, 5.0, "down").raw_score == 8.0
    assert rescored(once, 8.0, "back").raw_score is None


@pytest.mark.parametrize(("recalled", "learns"), [(0, False), (2, True)])
def test_a_coach_that_asks_a_model_learns_only_where_it_recalls_faults(recalled, learns):
    assert learns_from_batches(LLMCoach(_InstantProvider([]), recall_faults=recalled)) is learns
    assert learns_from_batches(CalibratedCoach(RulesCoach()))
