import asyncio
import time

import pytest

from lightning_mappa.coaches.pace import Pace


def test_limit_halves_once_per_burst_and_grows_back():
    pace = Pace(16)
    started = time.monotonic()
    for _ in range(10):
        pace.too_fast(started, 0.0)
    assert pace.limit == 8
    pace.too_fast(time.monotonic(), 0.0)
    assert pace.limit == 4
    for _ in range(4):
        pace.replied(0)
    assert 4.8 < pace.limit < 5
    for _ in range(1000):
        pace.replied(0)
    assert pace.limit == 16


def test_limit_never_falls_below_one_probe():
    pace = Pace(4)
    for _ in range(20):
        pace.too_fast(time.monotonic(), 0.0)
    assert pace.limit == 1


def test_no_more_than_the_limit_and_first_come_first_served():
    async def main() -> tuple[int, list[int]]:
        pace, active, most, order = Pace(3), 0, 0, []

        async def work(number: int) -> None:
            nonlocal active, most
            async with pace.slot():
                order.append(number)
                active += 1
                most = max(most, active)
                await asyncio.sleep(0.001)
                active -= 1

        await asyncio.gather(*(work(i) for i in range(20)))
        return most, order

    assert asyncio.run(main()) == (3, list(range(20)))


@pytest.mark.parametrize("cancelled", [0, 1, 2, 3])
def test_cancelled_waiters_leave_no_slot_behind(cancelled):
    async def main() -> bool:
        pace, gate = Pace(1), asyncio.Event()

        async def work(wait: bool) -> None:
            async with pace.slot():
                if wait:
                    await gate.wait()

        tasks = [asyncio.create_task(work(i == 0)) for i in range(4)]
        await asyncio.sleep(0)
        gate.set()
        await asyncio.sleep(0)
        tasks[cancelled].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        async with asyncio.timeout(1), pace.slot():
            return True

    assert asyncio.run(main())


def test_rates_hold():
    async def main() -> float:
        pace = Pace(50, requests_per_minute=1200, tokens_per_minute=None)
        started = time.monotonic()
        for _ in range(110):
            await pace.admit(1000)
        return time.monotonic() - started

    assert 0.45 < asyncio.run(main()) < 1.5  # 100 at once, then 20 a second


def test_tokens_that_were_not_used_are_given_back():
    async def main() -> float:
        pace = Pace(50, tokens_per_minute=60_000)
        started = time.monotonic()
        for _ in range(20):
            await pace.admit(2000)
            pace.replied(1990)
        return time.monotonic() - started

    assert asyncio.run(main()) < 0.3
