"""One verdict outside and inside of rollouts: it comes, or is missing in time."""

from __future__ import annotations

import asyncio

import pytest

from lightning_mappa.audit.passes import score_cases
from lightning_mappa.audit.planted import make_cases
from lightning_mappa.coaches.verdict import verdict_of
from lightning_mappa.errors import CoachError
from lightning_mappa.recoach.rescore import rescored
from lightning_mappa.testing import ScriptedCoach
from tests.unit.factories import make_action, make_scored

SCORED = make_scored("a", [make_action()], [3.0])


class Hangs(ScriptedCoach):
    async def score(self, episode, index):
        await asyncio.sleep(60)
        return await super().score(episode, index)


def hanging():
    return Hangs(lambda episode, index: 5.0)


def raising(error):
    def score(episode, index):
        raise error

    return ScriptedCoach(score)


@pytest.mark.parametrize(
    ("coach", "reason"),
    [
        (hanging(), "no verdict in 0.02 s (runtime.deadline_s)"),
        (raising(TimeoutError("its own")), "the coach raised TimeoutError: its own"),
        (raising(ValueError("no")), "the coach raised ValueError: no"),
        (raising(asyncio.CancelledError()), "the coach cancelled itself"),
    ],
)
def test_what_does_not_come_is_missing_with_its_reason(coach, reason):
    verdict = asyncio.run(verdict_of(coach, SCORED.episode, 0, 0.02))
    assert (verdict.score, verdict.reason, verdict.coach) == (None, reason, coach.name)


def test_what_ends_the_run_passes():
    with pytest.raises(CoachError, match="the budget is spent"):
        asyncio.run(verdict_of(raising(CoachError("the budget is spent")), SCORED.episode, 0))


def test_who_is_told_to_stop_stops():
    async def stopped() -> None:
        asking = asyncio.create_task(verdict_of(hanging(), SCORED.episode, 0))
        await asyncio.sleep(0.01)
        asking.cancel()
        await asking

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(stopped())


def test_an_audit_does_not_wait_for_a_coach_that_hangs():
    rows = asyncio.run(score_cases(hanging(), make_cases(0, 2), twice=False, deadline_s=0.02))
    assert {score for row in rows for score in row.first} == {None}


def test_a_second_scoring_does_not_wait_for_a_coach_that_hangs():
    (again,) = asyncio.run(rescored(hanging(), [SCORED], None, deadline_s=0.02))
    assert again.verdicts[0].score is None
    assert again.verdicts[0].reason.startswith("no verdict in")
