"""One score of several, and what becomes of those that disagree."""

from __future__ import annotations

import asyncio
import itertools
import threading

import pytest

from lightning_mappa.coaches.anthropic import AnthropicProvider
from lightning_mappa.coaches.base import accounts, bind_accounts, close_coach
from lightning_mappa.coaches.cascade import CascadeCoach
from lightning_mappa.coaches.ensemble import EnsembleCoach
from lightning_mappa.coaches.guard import BudgetGuard
from lightning_mappa.coaches.llm import LLMCoach
from lightning_mappa.errors import CoachError, ConfigError
from lightning_mappa.testing import ScriptedCoach
from lightning_mappa.types import Verdict
from tests.fake_messages_api import MODEL, FakeMessagesAPI, message, verdict
from tests.unit.coaches.calls import PRICES, make_reply
from tests.unit.coaches.conftest import QUICK, make_episode


def fixed(score):
    return ScriptedCoach(lambda episode, index: score)


def joint(*scores, **settings) -> Verdict:
    coach = EnsembleCoach([fixed(score) for score in scores], **settings)
    return asyncio.run(coach.score(make_episode(), 0))


@pytest.mark.parametrize(
    ("reduce", "scores", "expected"),
    [
        ("mean", (2, 6, 10), 6),
        ("mean", (2, 3), 2.5),
        ("median", (1, 9, 8), 8),
        ("median", (1, 9, 8, 2), 5),
        ("trimmed", (0, 7, 8, 10), 7.5),
        ("trimmed", (0, 7, 10), 7),
        ("trimmed", (4, 9), 6.5),
        ("mean", (None, 4, None, 8), 6),
        ("trimmed", (None, 0, 7, 10), 7),
        ("median", (None, 3), 3),
    ],
)
def test_reduce(reduce, scores, expected):
    got = joint(*scores, reduce=reduce)
    missing = scores.count(None)
    assert got.score == expected
    assert got.reason.startswith(f"{reduce} of {len(scores) - missing}, spread ")
    assert f", {missing} missing; " in got.reason


def test_all_missing_is_missing():
    got = joint(None, None)
    assert got.score is None
    assert got.reason == "none of 2 verdicts has a score: the script gives no score"


def test_order_is_of_no_matter():
    assert len({joint(*scores) for scores in itertools.permutations((0.1, 0.2, 0.7, None))}) == 1


def test_spread_is_in_the_reason():
    assert joint(3, 8, 4, max_spread=1).reason.startswith("mean of 3, spread 5 (3 4 8), 0 missing; nearest: scripted")


def test_abstains_when_they_disagree():
    settings = {"max_spread": 4, "on_disagreement": "abstain"}
    got = joint(3, 8, **settings)
    assert got.score is None
    assert got.reason == "abstains, the coaches disagree: spread 5 (3 8), 0 missing"
    assert joint(4, 8, **settings).score == 6


def test_reask_pools_both_rounds():
    rounds = iter([2, 8, 6, 8])
    coach = EnsembleCoach(
        [ScriptedCoach(lambda episode, index: next(rounds))] * 2, max_spread=3, on_disagreement="reask"
    )
    got = asyncio.run(coach.score(make_episode(), 0))
    assert (got.score, got.reason.partition(";")[0]) == (6, "mean of 4, spread 6 (2 6 8 8), 0 missing")
    assert next(rounds, None) is None


class Meeting:
    """A coach whose verdict waits until `size` of them are asked for."""

    name = "meeting"

    def __init__(self, size):
        self._barrier = asyncio.Barrier(size)

    async def score(self, episode, index):
        await self._barrier.wait()
        return Verdict(score=5.0, reason="met", coach=self.name)


def test_coaches_are_asked_side_by_side():
    async def meet():
        async with asyncio.timeout(2):
            return await EnsembleCoach([Meeting(6)], samples=6).score(make_episode(), 0)

    assert asyncio.run(meet()).score == 5


def test_a_coach_that_stops_the_run_stops_it_at_once():
    class Spent:
        name = "spent"

        async def score(self, episode, index):
            raise CoachError("spent")

    with pytest.raises(CoachError, match="spent"):
        asyncio.run(EnsembleCoach([Meeting(2), Spent()]).score(make_episode(), 0))


def test_raw_score_is_of_the_raw_scores():
    class Capped:
        name = "capped"

        async def score(self, episode, index):
            return Verdict(score=4.0, raw_score=8.0, reason="capped", coach=self.name)

    got = asyncio.run(EnsembleCoach([Capped(), fixed(6.0)]).score(make_episode(), 0))
    assert (got.score, got.raw_score) == (5, 7)


@pytest.mark.usefixtures("_warm_sdks")
def test_samples_of_one_model_are_calls_of_their_own_and_paid_once(tmp_path):
    scores = [3, 9, 6]
    with FakeMessagesAPI(lambda call: message(verdict(call, scores[call.number]))) as api:

        def sampled() -> Verdict:
            guard = BudgetGuard(model=MODEL, cache=tmp_path / "cache")
            llm = LLMCoach(AnthropicProvider(MODEL, base_url=api.url), guard=guard, **QUICK)
            llm.bind(tmp_path / "run")
            try:
                return asyncio.run(EnsembleCoach([llm], samples=3, reduce="median").score(make_episode(), 0))
            finally:
                llm.close()

        first = sampled()
        assert (first.score, first.reason.partition(";")[0]) == (6, "median of 3, spread 6 (3 6 9), 0 missing")
        assert sampled() == first
        assert len(api.calls) == 3


@pytest.mark.parametrize(
    ("coaches", "settings", "error"),
    [
        ([], {}, "0 coaches"),
        ([fixed(1)], {"samples": 0}, "0 samples"),
        ([fixed(1)], {"reduce": "max"}, "allowed: mean, median, trimmed"),
        ([fixed(1)], {"on_disagreement": "cry"}, "allowed: keep, reask, abstain"),
        ([fixed(1)], {"on_disagreement": "abstain"}, "needs coach.max_spread"),
    ],
)
def test_refused_settings(coaches, settings, error):
    with pytest.raises(ConfigError, match=error):
        EnsembleCoach(coaches, **settings)


class Slow:
    """A provider that counts its calls over all threads."""

    lock = threading.Lock()

    def __init__(self, model: str) -> None:
        self.model = model
        self.asked = 0

    async def check(self) -> None: ...

    async def ask(self, request, timeout_s):
        with Slow.lock:
            self.asked += 1
        await asyncio.sleep(0.002)
        return make_reply(model=self.model)

    async def close(self) -> None: ...


def of_models(kind, *, guarded=True, **budget):
    providers = [Slow("one"), Slow("two")]
    guards = [BudgetGuard(model=p.model, prices={p.model: PRICES}) if guarded else None for p in providers]
    coaches = [LLMCoach(p, guard=g, max_concurrency=16) for p, g in zip(providers, guards, strict=True)]
    return kind(coaches, **budget), providers


@pytest.mark.parametrize("kind", [EnsembleCoach, CascadeCoach])
def test_one_budget_over_all_coaches_is_never_passed_with_32_in_flight(kind, tmp_path):
    coach, providers = of_models(kind, budget_calls=50)
    bind_accounts(coach, tmp_path)

    async def scene():
        asked = [coach.score(make_episode(episode_id=f"e{number}"), 0) for number in range(80)]
        return await asyncio.gather(*asked, return_exceptions=True)

    ends = asyncio.run(scene())
    close_coach(coach)
    # A call may be set aside and cancelled, with its verdict, before it has left.
    assert 40 <= sum(provider.asked for provider in providers) <= accounts(coach)["calls"] == 50
    assert all(provider.asked for provider in providers)
    refused = {str(end) for end in ends if isinstance(end, CoachError)}
    assert any("has made the 50 calls of budget_calls" in reason for reason in refused)
    assert any("+coach.budget_calls=…" in reason for reason in refused)


def test_a_coach_whose_calls_cannot_be_counted_has_no_part_in_a_shared_budget():
    with pytest.raises(ConfigError, match="coach one has no guard that counts its calls in a shared budget"):
        of_models(EnsembleCoach, guarded=False, budget_usd=1)
    of_models(EnsembleCoach, guarded=False)
    EnsembleCoach([ScriptedCoach(lambda e, i: 5.0)], budget_calls=1)
