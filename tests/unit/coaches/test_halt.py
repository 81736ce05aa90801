"""A halted coach: nothing more leaves, what is in flight is waited for and booked, and no wait is without end."""

from __future__ import annotations

import asyncio

import pytest

from lightning_mappa.coaches.caller import Caller, RetryPolicy
from lightning_mappa.coaches.guard import BudgetGuard
from lightning_mappa.coaches.pace import Pace
from lightning_mappa.coaches.provider import CoachReply, CoachRequest
from lightning_mappa.errors import CoachError
from tests.unit.coaches.calls import PRICES, make_reply, make_request

POLICY = RetryPolicy(deadline_s=5, timeout_s=2, max_attempts=3, max_wait_s=0.1)


class Slow:
    """A provider whose replies take their time."""

    model = "m"

    def __init__(self, takes_s: float = 0.3) -> None:
        self.asked = 0
        self.closed = False
        self._takes_s = takes_s

    async def check(self) -> None: ...

    async def ask(self, request: CoachRequest, timeout_s: float) -> CoachReply:
        self.asked += 1
        await asyncio.sleep(self._takes_s)
        return make_reply()

    async def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("wait", [lambda caller: caller.halt("enough"), Caller.drain], ids=["halt", "drain"])
def test_paid_calls_go_on_when_who_halts_them_is_cancelled(tmp_path, wait):
    guard = BudgetGuard(model="m", prices={"m": PRICES})
    guard.bind(tmp_path)
    caller = Caller(Slow(), POLICY, Pace(8, None, None), guard)

    async def scene():
        calls = [asyncio.create_task(caller.call(make_request(f"q{number}"))) for number in range(3)]
        await asyncio.sleep(0.1)
        halting = asyncio.create_task(wait(caller))
        await asyncio.sleep(0.05)
        halting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await halting
        return await asyncio.gather(*calls)

    assert len(asyncio.run(scene())) == 3
    figures = guard.summary()
    assert (figures["calls"], figures["failed"], figures["usd_unsettled"]) == (3, 0, 0.0)
    assert figures["usd"] == pytest.approx(3 * 0.0015)


def test_no_call_leaves_after_a_halt_and_one_of_nothing_returns_at_once():
    provider = Slow()
    caller = Caller(provider, POLICY, Pace(8, None, None), None)

    async def scene():
        await caller.halt("enough")
        with pytest.raises(CoachError, match="enough"):
            await caller.call(make_request())

    asyncio.run(scene())
    assert not provider.asked
