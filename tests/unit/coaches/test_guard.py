"""Log, cache and budget together, as a coach meets them."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from lightning_mappa.coaches.budget import Budget
from lightning_mappa.coaches.guard import LOG, BudgetGuard
from lightning_mappa.coaches.pricing import Prices
from lightning_mappa.coaches.provider import CoachReply, CoachRequest, PassingError, Usage
from lightning_mappa.errors import CoachError, ConfigError
from tests.unit.coaches.calls import PRICES, make_reply, make_request


class Counter:
    """A provider that numbers its replies, and counts how many it works on at a time."""

    def __init__(
        self, *, fail_every: int = 0, usage: Usage | None = None, refused: bool = True, takes_s: float = 0.0
    ) -> None:
        self.asked = 0
        self.most_at_once = 0
        self._now = 0
        self._fail_every = fail_every
        self._refused = refused
        self._takes_s = takes_s
        self._usage = make_reply().usage if usage is None else usage

    async def ask(self, request: CoachRequest, timeout_s: float) -> CoachReply:
        self.asked += 1
        number = self.asked
        self._now += 1
        self.most_at_once = max(self.most_at_once, self._now)
        try:
            await asyncio.sleep(self._takes_s + 0.001 * (number % 7))
        finally:
            self._now -= 1
        if self._fail_every and number % self._fail_every == 0:
            raise PassingError("overloaded", refused=self._refused)
        return make_reply(f"reply {number}", usage=self._usage)


async def call(guard: BudgetGuard, provider: Counter, request: CoachRequest) -> CoachReply | None:
    """One attempt, as `CallGuard` says that it is made; None when it failed."""
    known = await guard.before(request)
    if known is not None:
        return known
    try:
        await guard.sent(request)
        reply = await provider.ask(request, 1.0)
    except BaseException as error:
        await guard.failed(request, billed=not getattr(error, "refused", False))
        if isinstance(error, PassingError):
            return None
        raise
    await guard.after(request, reply)
    return reply


def make_guard(folder=None, **settings) -> BudgetGuard:
    guard = BudgetGuard(**{"model": "m", "prices": {"m": PRICES}, **settings})
    if folder is not None:
        guard.bind(folder)
    return guard


def ask_all(guard, provider, requests, in_flight=32):
    async def run():
        slots = asyncio.Semaphore(in_flight)

        async def one(request):
            async with slots:
                return await call(guard, provider, request)

        return await asyncio.gather(*(one(request) for request in requests), return_exceptions=True)

    return asyncio.run(run())


REQUESTS = [make_request(f"step {number}") for number in range(80)]


@pytest.mark.parametrize("fail_every", [0, 3])
def test_a_budget_of_50_calls_is_never_passed_with_32_in_flight(tmp_path, fail_every):
    provider = Counter(fail_every=fail_every, takes_s=0.2)
    guard = make_guard(tmp_path, budget_calls=50)
    ends = ask_all(guard, provider, REQUESTS)
    refused = [end for end in ends if isinstance(end, CoachError)]
    assert provider.asked == guard.summary()["calls"] == 50
    assert 16 < provider.most_at_once <= 32
    assert len(refused) == 30
    paid = [end for end in ends if isinstance(end, CoachReply)]
    lines = [json.loads(line) for line in (tmp_path / LOG).read_text().splitlines()]
    assert sorted(reply.text for reply in paid) == sorted(line["reply"]["text"] for line in lines if line["reply"])
    assert len(lines) == 100
    assert [line["outcome"] for line in lines].count("sent") == 50
    # Resumed with the same cap: what is paid is there, and no other call is made.
    again = ask_all(make_guard(tmp_path, budget_calls=50), provider, REQUESTS)
    assert provider.asked == 50
    assert [end.text for end in again if isinstance(end, CoachReply)] == [reply.text for reply in paid]


def test_dollars_are_those_of_the_replies_and_stay_below_the_cap(tmp_path):
    provider = Counter(usage=Usage(input_tokens=900, output_tokens=90))  # 0.00135 dollars; at most 0.0015…
    guard = make_guard(tmp_path, budget_usd=0.05)
    ends = ask_all(guard, provider, REQUESTS)
    assert guard.summary()["usd"] == pytest.approx(0.00135 * provider.asked)
    assert 0.0484 < guard.summary()["usd"] <= 0.05
    message = next(str(end) for end in ends if isinstance(end, CoachError))
    assert "of the 0.05 dollars of budget_usd" in message


def test_a_resumed_run_with_a_larger_budget_goes_on_where_it_stopped(tmp_path):
    provider = Counter()
    ask_all(make_guard(tmp_path, budget_calls=30), provider, REQUESTS)
    guard = make_guard(tmp_path, budget_calls=80)
    ends = ask_all(guard, provider, REQUESTS)
    assert provider.asked == 80
    assert all(isinstance(end, CoachReply) for end in ends)
    figures = guard.summary()
    assert (figures["calls"], figures["logged"], figures["cached"]) == (80, 30, 0)
    assert figures["usd"] == pytest.approx(80 * 0.0015)
    assert figures["tokens"]["input"] == 80_000
    assert figures["latency_p50_s"] > 0


def test_the_same_content_asked_again_gets_a_reply_of_its_own_each_time(tmp_path):
    provider, requests = Counter(), [make_request(seed=seed) for seed in range(6)]
    first = ask_all(make_guard(tmp_path), provider, requests[:5])
    assert len({reply.text for reply in first}) == 5
    again = ask_all(make_guard(tmp_path), provider, requests[::-1])[::-1]
    assert provider.asked == 6
    # Whatever came first then and comes first now.
    assert again[:5] == first


@pytest.mark.parametrize(
    "other",
    [
        make_request(system="Be kind."),
        make_request(shared="Another task."),
        make_request(max_tokens=101),
        make_request(schema={"type": "object"}),
    ],
)
def test_whatever_else_is_asked_is_another_call(tmp_path, other):
    provider = Counter()
    ask_all(make_guard(tmp_path), provider, [make_request()])
    ask_all(make_guard(tmp_path), provider, [other])
    assert provider.asked == 2
    ask_all(make_guard(tmp_path), provider, [make_request(call_id="another name")])
    assert provider.asked == 2
    ask_all(make_guard(tmp_path), provider, [make_request(seed=1)])
    assert provider.asked == 3


@pytest.mark.parametrize("changed", [{"model": "m2"}, {"sent_along": "effort=high"}])
def test_another_model_is_asked_anew(tmp_path, changed):
    provider = Counter()
    ask_all(make_guard(tmp_path), provider, REQUESTS[:3])
    ask_all(make_guard(tmp_path, **changed), provider, REQUESTS[:3])
    assert provider.asked == 6


def test_a_second_run_is_free_with_a_cache(tmp_path):
    provider, cache = Counter(), str(tmp_path / "cache")
    first = ask_all(make_guard(tmp_path / "one", cache=cache), provider, REQUESTS)
    guard = make_guard(tmp_path / "two", cache=cache, budget_calls=0)
    assert ask_all(guard, provider, REQUESTS) == first
    assert provider.asked == 80
    assert guard.summary() | {"tokens": {}} == {
        "calls": 0,
        "failed": 0,
        "calls_lost_in_flight": 0,
        "cached": 80,
        "logged": 0,
        "usd": 0.0,
        "usd_unsettled": 0.0,
        "usd_lost_in_flight": 0.0,
        "usd_in_flight": 0.0,
        "tokens": {},
        "latency_p50_s": None,
    }
    # Its own log has them now.
    resumed = make_guard(tmp_path / "two", budget_calls=0)
    assert ask_all(resumed, provider, REQUESTS) == first
    assert (resumed.summary()["calls"], resumed.summary()["logged"]) == (0, 80)


def test_a_call_that_was_refused_gives_its_dollars_back_but_stays_counted(tmp_path):
    provider = Counter(fail_every=1)
    guard = make_guard(tmp_path, budget_usd=0.003)  # One call at a time fits.
    assert ask_all(guard, provider, REQUESTS[:10]) == [None] * 10
    assert guard.summary()["usd"] == guard.summary()["usd_unsettled"] == 0.0
    assert guard.summary()["calls"] == guard.summary()["failed"] == 10
    assert make_guard(tmp_path).summary()["calls"] == 10


def test_a_call_that_may_be_billed_counts_with_the_most_it_can_have_cost(tmp_path):
    provider = Counter(fail_every=1, refused=False)
    bound = float(Prices.of(PRICES).bound(REQUESTS[0]))
    guard = make_guard(tmp_path, budget_usd=3.5 * bound)
    ends = ask_all(guard, provider, REQUESTS[:10], in_flight=8)
    assert provider.asked == ends.count(None) == 3
    assert sum(isinstance(end, CoachError) for end in ends) == 7
    assert guard.summary()["usd"] == guard.summary()["usd_unsettled"] == pytest.approx(3 * bound)
    # A resumed run knows of them.
    resumed = make_guard(tmp_path, budget_usd=3.5 * bound).summary()
    assert (resumed["usd"], resumed["usd_unsettled"]) == pytest.approx((3 * bound, 3 * bound))


@pytest.mark.parametrize("usage", [Usage(), Usage(thinking_tokens=7)])
def test_a_reply_without_a_count_of_tokens_counts_with_the_most_it_can_have_cost(tmp_path, usage):
    provider = Counter(usage=usage)
    bound = float(Prices.of(PRICES).bound(REQUESTS[0]))
    shared = Budget(usd=100)
    guard = BudgetGuard(model="m", prices={"m": PRICES}, budget_usd=3.5 * bound, cache=str(tmp_path / "cache"))
    guard.share(shared)
    guard.bind(tmp_path / "one")
    ends = ask_all(guard, provider, REQUESTS[:10], in_flight=8)
    assert provider.asked == sum(isinstance(end, CoachReply) for end in ends) == 3
    assert sum(isinstance(end, CoachError) for end in ends) == 7
    assert guard.summary()["usd"] == guard.summary()["usd_unsettled"] == pytest.approx(3 * bound)
    assert guard.summary()["failed"] == 0
    assert float(shared.spent_usd) == pytest.approx(3 * bound)
    # A resumed run knows of them, and one that is answered from the cache pays nothing.
    resumed = make_guard(tmp_path / "one", budget_usd=3.5 * bound).summary()
    assert (resumed["usd"], resumed["usd_unsettled"]) == pytest.approx((3 * bound, 3 * bound))
    cached = make_guard(tmp_path / "two", budget_usd=3.5 * bound, cache=str(tmp_path / "cache"))
    ask_all(cached, provider, REQUESTS[:3])
    assert cached.summary()["usd"] == cached.summary()["usd_unsettled"] == 0.0


async def leave(guard: BudgetGuard, requests) -> None:
    """Calls that are in flight when their process is killed: nothing of them is written after they left."""
    for request in requests:
        assert await guard.before(request) is None
        await guard.sent(request)


def test_calls_in_flight_at_a_kill_are_spent_at_the_most_they_can_have_cost(tmp_path):
    bound = Prices.of(PRICES).bound(REQUESTS[0])
    provider = Counter()
    asyncio.run(leave(make_guard(tmp_path, budget_usd=1), REQUESTS[:4]))
    for _ in range(2):  # however often it is resumed
        guard = make_guard(tmp_path, budget_usd=1)
        figures = guard.summary()
        assert (figures["calls"], figures["calls_lost_in_flight"], figures["failed"]) == (4, 4, 0)
        assert figures["usd"] == figures["usd_lost_in_flight"] == figures["usd_unsettled"] == float(4 * bound)
    # They are paid anew once, and their first time stays booked.
    ask_all(guard, provider, REQUESTS[:4])
    resumed = make_guard(tmp_path, budget_usd=1)
    ask_all(resumed, provider, REQUESTS[:4])
    assert provider.asked == 4
    assert (resumed.summary()["calls"], resumed.summary()["calls_lost_in_flight"]) == (8, 4)
    assert resumed.summary()["usd"] == pytest.approx(float(4 * bound) + 4 * 0.0015)


def test_caps_hold_over_any_number_of_kills(tmp_path):
    bound = Prices.of(PRICES).bound(REQUESTS[0])
    shared = None
    for kill in range(3):
        shared = Budget(calls=8)
        guard = make_guard(budget_usd=float(3 * bound))
        guard.share(shared)
        guard.bind(tmp_path)
        assert guard.summary()["calls"] == shared.calls == kill
        asyncio.run(leave(guard, REQUESTS[kill : kill + 1]))
    provider = Counter()
    (refused,) = ask_all(make_guard(tmp_path, budget_usd=float(3 * bound)), provider, REQUESTS[:1])
    assert isinstance(refused, CoachError)
    assert provider.asked == 0


def test_a_call_that_never_left_counts_nowhere(tmp_path):
    async def scene() -> None:
        assert await guard.before(REQUESTS[0]) is None
        await guard.failed(REQUESTS[0], billed=False)

    guard = make_guard(tmp_path, budget_calls=1)
    asyncio.run(scene())
    asyncio.run(scene())
    assert (guard.summary()["calls"], guard.summary()["failed"], guard.summary()["usd"]) == (0, 0, 0.0)
    assert (tmp_path / LOG).read_text() == ""


@pytest.mark.parametrize("kind", ["input_tokens", "cache_read_tokens", "cache_write_tokens", "output_tokens"])
def test_a_reply_with_any_count_of_tokens_costs_what_it_says(tmp_path, kind):
    guard, usage = make_guard(tmp_path, budget_usd=1), Usage(**{kind: 1000})
    ask_all(guard, Counter(usage=usage), REQUESTS[:2])
    assert guard.summary()["usd"] == pytest.approx(2 * float(Prices.of(PRICES).cost(usage)))
    assert guard.summary()["usd_unsettled"] == 0.0


def test_without_prices_a_reply_without_a_count_of_tokens_has_no_dollars(tmp_path):
    guard = make_guard(tmp_path, prices=None)
    ask_all(guard, Counter(usage=Usage()), REQUESTS[:2])
    assert (guard.summary()["usd"], guard.summary()["usd_unsettled"]) == (None, None)
    assert {json.loads(line)["usd"] for line in (tmp_path / LOG).read_text().splitlines()} == {"0"}


@pytest.mark.parametrize("fail_every", [0, 3])
def test_guards_that_share_a_budget_never_pass_it_together(tmp_path, fail_every):
    """Each in a thread and an event loop of its own, as coaches have them; 32 in flight."""
    provider, shared = Counter(fail_every=fail_every), Budget(calls=50, key="coach")
    guards = [make_guard(model=name, prices={name: PRICES}) for name in "ab"]
    for guard, name in zip(guards, "ab", strict=True):
        guard.share(shared)
        guard.bind(tmp_path / name)
    with ThreadPoolExecutor() as pool:
        jobs = [pool.submit(ask_all, guard, provider, REQUESTS, 16) for guard in guards]
        ends = [end for job in jobs for end in job.result(timeout=30)]
    assert shared.calls == 50 == sum(guard.summary()["calls"] for guard in guards)
    refused = {str(end) for end in ends if isinstance(end, CoachError)}
    assert refused == {
        "the coach has made the 50 calls of budget_calls; "
        "go on with a larger one: +coach.budget_calls=… (mappa fit: with resume=RUN)"
    }
    assert sum(isinstance(end, CoachError) for end in ends) == 160 - 50
    # Resumed, the shared budget is spent.
    again = Budget(calls=50, key="coach")
    for name in "ab":
        guard = make_guard(model=name, prices={name: PRICES})
        guard.share(again)
        guard.bind(tmp_path / name)
    assert again.calls == 50


def test_a_call_that_the_shared_budget_refuses_counts_nowhere(tmp_path):
    guard = make_guard(tmp_path, budget_calls=10)
    guard.share(Budget(calls=2))
    ends = ask_all(guard, Counter(), REQUESTS[:5])
    assert sum(isinstance(end, CoachError) for end in ends) == 3
    assert guard.summary()["calls"] == 2


def test_dollars_can_only_be_shared_where_prices_are_known():
    with pytest.raises(ConfigError, match=r"coach.budget_usd needs the prices of m: give them in its guard.prices"):
        make_guard(prices=None).share(Budget(usd=1))
    make_guard(prices=None).share(Budget(calls=1))


def test_once_the_log_cannot_be_written_nothing_more_is_asked(tmp_path, monkeypatch):
    provider = Counter()
    ask_all(make_guard(tmp_path), provider, REQUESTS[:1])
    guard = make_guard(tmp_path)

    def full(descriptor, line):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.write", full)
    ends = ask_all(guard, provider, REQUESTS, in_flight=4)
    assert [end.text for end in ends if isinstance(end, CoachReply)] == ["reply 1"]
    assert provider.asked == 1  # what cannot be written down does not leave
    assert {str(end) for end in ends if isinstance(end, CoachError)} == {
        f"the coach stops: cannot write {tmp_path / LOG} (No space left on device)"
    }


def test_without_prices_dollars_are_unknown_and_cannot_be_capped(tmp_path):
    guard = make_guard(tmp_path, prices=None)
    ask_all(guard, Counter(), REQUESTS[:2])
    assert guard.summary()["usd"] is None
    with pytest.raises(ConfigError, match="budget_usd=1 needs the prices of m; prices are given of no model"):
        make_guard(prices=None, budget_usd=1)
    with pytest.raises(ConfigError, match="budget_usd=1 needs the prices of m2; prices are given of m"):
        make_guard(model="m2", budget_usd=1)
