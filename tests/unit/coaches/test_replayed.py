"""What a run that goes on makes of replies that it was given before: scores stay, others are asked for anew."""

from __future__ import annotations

import asyncio
import json
import random

import pytest

from lightning_mappa.coaches.ensemble import EnsembleCoach
from lightning_mappa.coaches.guard import BudgetGuard
from lightning_mappa.coaches.llm import LLMCoach
from lightning_mappa.coaches.provider import CoachReply, CoachRequest, Usage
from tests.fake_messages_api import MODEL, Answer, Call, message, verdict
from tests.unit.coaches.calls import PRICES
from tests.unit.coaches.conftest import make_episode
from tests.unit.coaches.test_batched import answer, entries, score_all

GARBAGE = message("{not json")
NO_SCORE = {
    "no JSON": GARBAGE,
    "empty": message(None),
    "cut": message("{", stop_reason="max_tokens"),
    "off the scale": message('{"score": 11}'),
    "refused": message(None, stop_reason="refusal"),
    "ended otherwise": message("7", stop_reason="pause_turn"),
}


@pytest.fixture
def process(serve, tmp_path):
    """`process(answer)`: a coach of another process of the same run."""

    def start(answer, folder="run", cache=None, **settings):
        guard = BudgetGuard(model=MODEL, prices={MODEL: PRICES}, budget_usd=1, cache=cache)
        service = serve(answer, guard=guard, **settings)
        service.coach.bind(tmp_path / folder)
        return service

    return start


def good(call: Call) -> Answer:
    return message(verdict(call, 7, "the sum is right"))


def always(fault: Answer):
    return lambda call: fault


@pytest.mark.parametrize("fault", NO_SCORE.values(), ids=NO_SCORE.keys())
def test_a_reply_without_a_score_is_asked_for_anew_and_stays_paid(process, fault):
    first = process(always(fault))
    assert first.score().score is None
    asked, spent = len(first.api.calls), first.coach.summary()["usd"]
    assert spent > 0

    second = process(good)
    assert second.score().score == 7
    assert len(second.api.calls) == 1
    assert second.coach.counts["passed_over"] == 1
    assert second.coach.summary()["calls"] == asked + 1
    assert second.coach.summary()["usd"] > spent

    third = process(always(fault))
    assert third.score() == second.score()
    assert third.score().score is None  # asked a second time: another reply


def test_what_stays_without_a_score_is_asked_for_as_often_as_at_first(process):
    for number in range(3):
        service = process(always(GARBAGE))
        assert service.score().reason == "the reply is no valid JSON; asked twice"
        assert len(service.api.calls) == 2
        assert service.coach.summary()["calls"] == 2 * (number + 1)


def test_a_reply_that_was_mended_by_asking_twice_is_replayed_with_its_fault(process):
    first = process(lambda call: GARBAGE if call.number == 0 else good(call))
    given = first.score()
    again = process(always(GARBAGE))
    assert again.score() == given
    assert given.score == 7
    assert not again.api.calls


def test_of_a_batch_the_scores_stay_and_only_the_gaps_are_new(process):
    first = process(lambda call: answer(call, entries([1, 3], lambda step: 2)), batched=True)
    episode = make_episode(3)
    assert [v.score for v in score_all(first.coach, episode)] == [2, None, 2]
    second = process(lambda call: answer(call, entries([1, 2, 3], lambda step: 9)), batched=True)
    assert [v.score for v in score_all(second.coach, episode)] == [2, 9, 2]
    assert len(second.api.calls) == 1
    third = process(always(GARBAGE), batched=True)
    assert [v.score for v in score_all(third.coach, episode)] == [2, 9, 2]
    assert not third.api.calls


def test_another_run_takes_no_reply_without_a_score_from_the_cache(process, tmp_path):
    cache = str(tmp_path / "cache")
    assert process(always(GARBAGE), "one", cache).score().score is None
    two = process(good, "two", cache)
    assert two.score().score == 7
    assert len(two.api.calls) == 1
    three = process(always(GARBAGE), "three", cache)
    assert three.score().score == 7
    assert not three.api.calls


class Drawing:
    """Draws its replies by seed, some of them without a score, and takes its time as it likes."""

    model = "drawing"

    def __init__(self, chance: random.Random, *, dies_after: int = 10**9) -> None:
        self.seeds: list[int] = []
        self._chance = chance
        self._dies_after = dies_after

    async def check(self) -> None: ...

    async def ask(self, request: CoachRequest, timeout_s: float) -> CoachReply:
        self.seeds.append(request.seed)
        if len(self.seeds) > self._dies_after:
            await asyncio.sleep(60)
        await asyncio.sleep(self._chance.random() * 0.01)
        text = json.dumps({"score": request.seed % 11})
        return CoachReply(text=text, finish="end", usage=Usage(), model=self.model, structured=True)

    async def close(self) -> None: ...


EPISODES = [make_episode(2, episode_id=f"train-000003-00000-{sample:03d}") for sample in range(4)]
"""Four samples of one task which say the same, so that all their cases are the same."""


def run(folder, provider, *, seed=0, wait_s=None):
    """Verdicts by episode and action, of an ensemble that asks three times; None where it was killed."""
    coach = LLMCoach(provider, seed=seed, guard=BudgetGuard(model=provider.model))
    coach.bind(folder)

    async def scene():
        ensemble = EnsembleCoach([coach], samples=3)
        jobs = [ensemble.score(episode, index) for episode in EPISODES for index in range(2)]
        return [given.reason for given in await asyncio.wait_for(asyncio.gather(*jobs), wait_s)]

    return asyncio.run(scene())


@pytest.mark.parametrize("dies_after", [0, 5, 13, 20])
def test_a_run_that_goes_on_gets_what_it_would_have_got(tmp_path, dies_after):
    whole = Drawing(random.Random(1))
    wanted = run(tmp_path / "whole", whole)
    assert len(set(whole.seeds)) == len(whole.seeds) == 4 * 2 * 3
    cut = Drawing(random.Random(2), dies_after=dies_after)
    with pytest.raises(TimeoutError):
        run(tmp_path / "cut", cut, wait_s=0.5)
    rest = Drawing(random.Random(3))
    assert run(tmp_path / "cut", rest) == wanted
    assert set(rest.seeds) <= set(whole.seeds) == set(cut.seeds) | set(rest.seeds)
    assert len(rest.seeds) == 24 - dies_after


def test_another_seed_of_the_run_draws_other_replies(tmp_path):
    one, two = Drawing(random.Random(0)), Drawing(random.Random(0))
    run(tmp_path / "one", one)
    run(tmp_path / "two", two, seed=1)
    assert not set(one.seeds) & set(two.seeds)
