"""Caps hold whatever order calls in flight begin, fail and end in."""

from __future__ import annotations

import asyncio
import random
from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_mappa.coaches.budget import Budget, forecast
from lightning_mappa.errors import CoachError, ConfigError, ExitCode


async def hammer(budget: Budget, *, jobs: int, in_flight: int, chance: random.Random, cost, bound) -> list[str]:
    """Makes up to `jobs` calls, `in_flight` at a time; returns how each ended. None is refused while others fly."""
    slots = asyncio.Semaphore(in_flight)
    open_now = 0

    async def call() -> str:
        nonlocal open_now
        async with slots:
            try:
                reservation = await budget.reserve(bound)
            except CoachError:
                assert open_now == 0
                return "refused"
            open_now += 1
            await asyncio.sleep(chance.random() * 1e-3)
            open_now -= 1
            if chance.random() < 0.2:
                budget.release(reservation)
                return "failed"
            budget.settle(reservation, cost(chance))
            return "paid"

    return await asyncio.gather(*(call() for _ in range(jobs)))


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), in_flight=st.integers(1, 32), cap=st.integers(0, 60))
def test_a_budget_of_calls_is_used_up_and_never_passed(seed, in_flight, cap):
    budget = Budget(calls=cap)
    ends = asyncio.run(
        hammer(
            budget,
            jobs=80,
            in_flight=in_flight,
            chance=random.Random(seed),
            cost=lambda chance: Decimal("0.001"),
            bound=Decimal("0.003"),
        )
    )
    assert budget.calls == cap == ends.count("paid") + ends.count("failed")
    assert ends.count("refused") == 80 - cap


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), in_flight=st.integers(1, 32), cap=st.decimals("0.001", "0.1", places=4))
def test_dollars_are_never_passed_and_used_up_to_less_than_one_bound(seed, in_flight, cap):
    bound = Decimal("0.003")
    budget = Budget(usd=float(cap))
    ends = asyncio.run(
        hammer(
            budget,
            jobs=400,
            in_flight=in_flight,
            chance=random.Random(seed),
            cost=lambda chance: Decimal(chance.randint(0, 3000)) / 1_000_000,
            bound=bound,
        )
    )
    assert budget.committed_usd == budget.spent_usd <= cap
    if "refused" in ends:
        assert budget.spent_usd + bound > cap


def test_a_call_that_fits_once_another_has_settled_waits_for_it():
    async def scene() -> None:
        budget = Budget(usd=0.004)
        first = await budget.reserve(Decimal("0.003"))
        second = asyncio.create_task(budget.reserve(Decimal("0.003")))
        await asyncio.sleep(0)
        assert not second.done()
        budget.settle(first, Decimal("0.001"))
        budget.settle(await second, Decimal("0.002"))
        assert budget.spent_usd == Decimal("0.003")

    asyncio.run(scene())


def test_a_waiting_call_that_is_cancelled_takes_nothing():
    async def scene() -> None:
        budget = Budget(calls=2, usd=0.003)
        first = await budget.reserve(Decimal("0.003"))
        second = asyncio.create_task(budget.reserve(Decimal("0.003")))
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        budget.release(first)
        await budget.reserve(Decimal("0.003"))
        assert budget.calls == 2

    asyncio.run(scene())


def test_one_budget_serves_one_event_loop_after_the_other():
    budget = Budget(calls=8)
    for _ in range(2):
        asyncio.run(
            hammer(budget, jobs=4, in_flight=4, chance=random.Random(0), cost=lambda c: Decimal(0), bound=Decimal(0))
        )
    spent = r"the 8 calls of budget_calls; go on with a larger one: .*budget_calls="
    with pytest.raises(CoachError, match=spent) as refusal:
        asyncio.run(budget.reserve(Decimal(0)))
    assert refusal.value.exit_code is ExitCode.COACH


def test_what_an_earlier_process_spent_counts():
    budget = Budget(usd=0.01)
    budget.book(Decimal("0.009"))
    with pytest.raises(CoachError, match=r"spent 0\.0090 of the 0\.01 dollars of budget_usd"):
        asyncio.run(budget.reserve(Decimal("0.0011")))
    asyncio.run(budget.reserve(Decimal("0.001")))


@pytest.mark.parametrize("caps", [{"usd": -1.0}, {"usd": float("nan")}, {"calls": -1}])
def test_a_cap_below_nothing_is_refused(caps):
    with pytest.raises(ConfigError, match=r"budget_\w+=.*: must be 0"):
        Budget(**caps)


def test_forecast():
    assert forecast(0.25, 1, 40) == 10.0
    assert forecast(12.0, 40, 40) == 12.0
