"""A halted coach: nothing more leaves, what is in flight is waited for and booked, and no wait is without end."""

from __future__ import annotations

import asyncio
import time

import pytest

from lightning_mappa.coaches.caller import Caller, RetryPolicy
from lightning_mappa.coaches.guard import BudgetGuard
from lightning_mappa.coaches.llm import LLMCoach
from lightning_mappa.coaches.loop_thread import LoopThread
from lightning_mappa.coaches.pace import Pace
from lightning_mappa.coaches.provider import CoachReply, CoachRequest
from lightning_mappa.errors import CoachError
from lightning_mappa.types import Verdict
from tests.unit.coaches.calls import PRICES, make_reply, make_request
from tests.unit.coaches.conftest import QUICK, make_episode

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


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr("lightning_mappa.coaches.caller._BOOKING_S", 0.2)
    monkeypatch.setattr("lightning_mappa.coaches.loop_thread._CANCEL_S", 0.2)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("halted", [True, False], ids=["halted first", "closed at once"])
def test_a_provider_that_takes_longer_than_it_may_is_cut_booked_and_closed(tmp_path, halted):
    """As one does whose engines start with the first call."""
    provider, guard = Slow(takes_s=60), BudgetGuard(model="m", prices={"m": PRICES}, budget_usd=1)
    coach = LLMCoach(provider, guard=guard, **{**QUICK, "timeout_s": 0.5})
    coach.bind(tmp_path)

    async def scene():
        scoring = [asyncio.create_task(coach.score(make_episode(episode_id=f"e{i}"), 0)) for i in range(2)]
        await asyncio.sleep(0.2)
        assert provider.asked == 2
        in_flight = guard.summary()["usd_in_flight"]
        if halted:
            await coach.halt("enough")
        await asyncio.to_thread(coach.close)
        given = await asyncio.gather(*scoring, return_exceptions=True)
        # Closed at once, a verdict is cut, or missing by its own deadline: whichever comes first.
        none = CoachError if halted else (asyncio.CancelledError, CoachError, Verdict)
        assert all(isinstance(one, none) and getattr(one, "score", None) is None for one in given), given
        return in_flight

    started = time.monotonic()
    in_flight = asyncio.run(scene())
    assert time.monotonic() - started < 3
    assert provider.closed
    figures = guard.summary()
    assert (figures["calls"], figures["failed"], figures["usd_in_flight"]) == (2, 2, 0.0)
    assert in_flight > 0
    assert figures["usd"] == figures["usd_unsettled"] == pytest.approx(in_flight)


async def hang() -> None:
    await asyncio.sleep(60)


async def fail() -> None:
    raise RuntimeError("broken")


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("first", [hang, fail])
def test_what_comes_last_runs_whatever_became_of_the_first(first):
    thread, closed = LoopThread("coach m"), []

    async def last():
        closed.append(True)

    asyncio.run(thread.run(asyncio.sleep(0)))
    started = time.monotonic()
    thread.close(last(), first=first(), first_s=0.2)
    assert closed
    assert time.monotonic() - started < 2


@pytest.mark.usefixtures("quick")
def test_what_does_not_end_is_left_with_a_warning(caplog):
    thread = LoopThread("coach m")
    asyncio.run(thread.run(asyncio.sleep(0)))
    thread.close(hang(), 0.2)
    assert caplog.messages == ["coach m has not ended within 0.2 s"]

    blocked = LoopThread("coach m")
    asyncio.run(blocked.run(asyncio.sleep(0)))

    async def block():
        time.sleep(2)

    caplog.clear()
    blocked.close(block(), 0.2, first_s=0.2)
    assert caplog.messages == ["coach m does not end"]


def test_an_error_of_the_last_part_is_told():
    thread = LoopThread("coach m")
    asyncio.run(thread.run(asyncio.sleep(0)))
    with pytest.raises(RuntimeError, match="broken"):
        thread.close(fail())
