"""All actions of an episode in one call: what is asked, what is read, and how often it is paid for."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace

import pytest

from lightning_mappa.coaches.base import needs_outcome
from lightning_mappa.coaches.ensemble import EnsembleCoach
from lightning_mappa.coaches.guard import BudgetGuard
from lightning_mappa.coaches.parse_batch import read_batch
from lightning_mappa.coaches.shared_calls import SharedCalls
from lightning_mappa.errors import CoachError
from lightning_mappa.types import ActionStatus, StopReason, Verdict
from tests.fake_messages_api import MODEL, Answer, Call, error, message
from tests.unit.coaches.calls import make_reply
from tests.unit.coaches.conftest import make_episode
from tests.unit.factories import make_action

CASE = "0123456789abcdef"


def asked_steps(call: Call) -> list[int]:
    question = call.body["messages"][0]["content"][1]["text"]
    (listed,) = re.findall(r"Judge these steps, each by itself: ([0-9, ]+)\.", question)
    return [int(number) for number in listed.split(", ")]


def entries(steps, score=lambda step: step):
    return [{"step": step, "reason": f"step {step}", "score": score(step)} for step in steps]


def answer(call: Call, verdicts) -> Answer:
    return message(json.dumps({"case": call.case, "verdicts": verdicts}))


def good(call: Call) -> Answer:
    return answer(call, entries(asked_steps(call)))


def score_all(coach, episode, indices=None) -> list[Verdict]:
    async def scene():
        wanted = range(len(episode.actions)) if indices is None else indices
        return list(await asyncio.gather(*(coach.score(episode, index) for index in wanted)))

    return asyncio.run(scene())


# -- what a reply says -------------------------------------------------------------------------------------------------


def read(verdicts, numbers=(1, 2, 3), case=CASE, **fields):
    text = json.dumps({"case": case, "verdicts": verdicts})
    return read_batch(make_reply(text, **fields), case=CASE, numbers=numbers)


def test_every_step_has_its_score_whatever_their_order():
    readings = read(entries([3, 1, 2]))
    assert {number: (reading.score, reading.reason) for number, reading in readings.items()} == {
        1: (1.0, "step 1"),
        2: (2.0, "step 2"),
        3: (3.0, "step 3"),
    }
    assert not any(reading.ask_again or reading.alarms for reading in readings.values())


@pytest.mark.parametrize(
    ("verdicts", "reason", "alarms"),
    [
        (entries([1, 3]), "the reply does not judge step 2", ("lacking_step",)),
        (entries([1, 2, 2, 3]), "the reply judges step 2 more than once", ("repeated_step",)),
        (
            entries([1, 2, 3], lambda step: 11 if step == 2 else step),
            "the score is not from 0 to 10 (step 2)",
            ("out_of_range",),
        ),
        (entries([1, 2, 3], lambda step: 7.5 if step == 2 else step), "the score is no integer (step 2)", ()),
        (entries([1, 2, 3], lambda step: None if step == 2 else step), "the score is no number (step 2)", ()),
        ([*entries([1, 3]), {"step": 2, "reason": "?"}], "the reply gives step 2 no score", ()),
    ],
)
def test_a_step_without_a_score_of_its_own_is_missing_alone(verdicts, reason, alarms):
    readings = read(verdicts)
    assert (readings[2].score, readings[2].reason, readings[2].alarms) == (None, reason, alarms)
    assert readings[2].ask_again
    assert (readings[1].score, readings[3].score) == (1.0, 3.0)


@pytest.mark.parametrize(
    ("steps", "numbers", "extra"),
    [
        ([0, 1, 2], (1, 2, 3), 0),  # counted from 0: the verdict named 1 is about step 2
        ([0, 1], (1, 2, 3), 0),
        ([2, 3, 4], (1, 2, 3), 4),  # counted from 2
        ([1, 2, 3, 4], (1, 2, 3), 4),
        ([1, 2], (1, 3), 2),  # counted without the step that is not judged
        ([1, 3, -1], (1, 3), -1),
        ([0], (1,), 0),
    ],
)
def test_a_step_that_was_not_asked_for_makes_the_whole_reply_unreadable(steps, numbers, extra):
    readings = read(entries(steps), numbers)
    assert tuple(readings) == numbers
    reason = f"the reply judges step {extra}, which was not asked for"
    for reading in readings.values():
        assert (reading.score, reading.reason, reading.alarms) == (None, reason, ("extra_step",))
        assert reading.ask_again


def of_case(rest):
    return make_reply(f'{{"case": "{CASE}", {rest}')


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (make_reply("7"), "the reply is JSON, but no object"),
        (make_reply("8/10", structured=False), "the reply is no valid JSON"),
        (make_reply('{"score": 7}'), "the reply has no verdicts"),
        (of_case('"verdicts": {"1": 7}}'), "the verdicts of the reply are no list"),
        (of_case('"verdicts": [{"reason": "", "score": 7}]}'), "a verdict of the reply does not name its step"),
        (of_case('"verdicts": [7, 8, 9]}'), "a verdict of the reply does not name its step"),
        (of_case('"verdicts": [{"step": true, "score": 7}]}'), "a verdict of the reply does not name its step"),
        (make_reply('{"case": "f", "verdicts": []}'), "the reply is about another case"),
        (make_reply(json.dumps({"verdicts": entries([1, 2])})), "the reply does not name the case"),
        (make_reply(json.dumps({"case": None, "verdicts": entries([1, 2])})), "the reply is about another case"),
        (make_reply("", finish="refusal"), "the coach refused"),
        (make_reply("", finish="length"), "the reply was cut at the token limit"),
        (make_reply('{"verdicts": [{"step": 1, "score": 7, "score": 9}]}'), "the reply is no valid JSON"),
    ],
)
def test_a_reply_that_is_none_leaves_all_steps_missing(reply, reason):
    readings = read_batch(reply, case=CASE, numbers=(1, 2))
    assert [(reading.score, reading.reason) for reading in readings.values()] == [(None, reason)] * 2


def test_json_among_prose_counts_only_where_it_names_the_case():
    body = json.dumps({"case": CASE, "verdicts": entries([1])})
    fenced = read_batch(make_reply(f"Well.\n```json\n{body}\n```", structured=False), case=CASE, numbers=(1,))
    assert fenced[1].score == 1.0
    nameless = body.replace(CASE, "f" * 16)
    other = read_batch(make_reply(f"Well.\n```json\n{nameless}\n```", structured=False), case=CASE, numbers=(1,))
    assert other[1].reason == "the JSON in the reply does not name the case"


# -- the coach ---------------------------------------------------------------------------------------------------------


def test_one_call_gives_every_action_of_an_episode_its_verdict(serve):
    service = serve(good, batched=True)
    verdicts = score_all(service.coach, make_episode(4))
    assert [(verdict.score, verdict.reason, verdict.coach) for verdict in verdicts] == [
        (float(step), f"step {step}", MODEL) for step in (1, 2, 3, 4)
    ]
    (call,) = service.api.calls
    schema = call.body["output_config"]["format"]["schema"]["properties"]["verdicts"]["items"]
    assert schema["properties"]["score"]["enum"] == list(range(11))
    assert call.body["max_tokens"] == 2048 + 3 * 200
    assert service.coach.counts["verdicts"] == 4


def test_asked_again_it_calls_again_and_another_text_is_another_call(serve):
    service = serve(good, batched=True)
    episode = make_episode(3)
    score_all(service.coach, episode)
    score_all(service.coach, episode)
    assert len(service.api.calls) == 2
    changed = replace(episode, actions=(replace(episode.actions[0], text="other"), *episode.actions[1:]))
    assert score_all(service.coach, changed, [0])[0].score == 1
    assert len(service.api.calls) == 3


def test_two_samples_of_an_ensemble_are_two_calls(serve):
    service = serve(good, batched=True)
    verdicts = score_all(EnsembleCoach([service.coach], samples=2), make_episode(4))
    assert [verdict.score for verdict in verdicts] == [1, 2, 3, 4]
    assert len(service.api.calls) == 2


def test_what_has_nothing_to_judge_is_shown_and_not_asked_for(serve):
    service = serve(good, batched=True)
    unasked = make_action(index=1, status=ActionStatus.PROMPT_TOO_LONG, stop_reason=StopReason.NONE, text="")
    episode = replace(make_episode(), actions=(make_action(), unasked, make_action(index=2)))
    assert [verdict.score for verdict in score_all(service.coach, episode)] == [1, None, 3]
    (call,) = service.api.calls
    assert asked_steps(call) == [1, 3]
    assert "It did not fit the agent's context" in call.body["messages"][0]["content"][1]["text"]


def test_a_lacking_step_is_asked_for_once_more_and_the_others_keep_their_first_score(serve):
    def first_short(call: Call) -> Answer:
        return answer(call, entries([1, 3], lambda step: 2) if call.number == 0 else entries([1, 2, 3], lambda step: 9))

    service = serve(first_short, batched=True)
    assert [verdict.score for verdict in score_all(service.coach, make_episode(3))] == [2, 9, 2]
    assert len(service.api.calls) == 2
    assert service.coach.counts["lacking_step"] == 1


def test_a_step_that_stays_lacking_is_missing_with_its_reason(serve):
    service = serve(lambda call: answer(call, entries([1])), batched=True)
    verdicts = score_all(service.coach, make_episode(2))
    assert [verdict.score for verdict in verdicts] == [1, None]
    assert verdicts[1].reason == "the reply does not judge step 2; asked twice"


def test_a_reply_that_counts_from_0_is_asked_for_again_as_a_whole(serve):
    def first_from_0(call: Call) -> Answer:
        return answer(call, entries([0, 1, 2], lambda step: 9)) if call.number == 0 else good(call)

    service = serve(first_from_0, batched=True)
    assert [verdict.score for verdict in score_all(service.coach, make_episode(3))] == [1, 2, 3]
    assert asked_steps(service.api.calls[1]) == [1, 2, 3]
    assert service.coach.counts["extra_step"] == 3


def test_a_second_reply_that_counts_from_0_fills_no_gap(serve):
    def then_from_0(call: Call) -> Answer:
        return answer(call, entries([1] if call.number == 0 else [0, 1, 2], lambda step: 5))

    service = serve(then_from_0, batched=True)
    verdicts = score_all(service.coach, make_episode(3))
    assert [verdict.score for verdict in verdicts] == [5, None, None]
    assert verdicts[1].reason == "the reply judges step 0, which was not asked for; asked twice"


def test_what_was_read_outlives_a_second_call_that_fails(serve):
    def then_down(call: Call) -> Answer:
        return answer(call, entries([1])) if call.number == 0 else error(500, "api_error")

    service = serve(then_down, batched=True, max_attempts=1)
    verdicts = score_all(service.coach, make_episode(2))
    assert verdicts[0].score == 1
    assert verdicts[1].reason.startswith("no reply: HTTP 500")


def test_a_batch_is_one_call_of_the_budget(serve):
    guard = BudgetGuard(model=MODEL, budget_calls=2)
    service = serve(good, batched=True, guard=guard)
    for number in range(2):
        score_all(service.coach, make_episode(4, episode_id=f"e{number}"))
    assert service.coach.summary()["calls"] == 2
    with pytest.raises(CoachError, match="has made the 2 calls of budget_calls"):
        score_all(service.coach, make_episode(4, episode_id="e2"))


@pytest.mark.parametrize(("show", "shown"), [("none", False), ("last", True), ("all", True)])
def test_the_outcome_is_in_view_where_any_step_is_judged_by_it(serve, show, shown):
    service = serve(good, batched=True, show_reference=show)
    episode = make_episode(2)
    score_all(service.coach, episode)
    text = service.api.calls[0].body["messages"][0]["content"][1]["text"]
    assert ("Outcome: 1 " in text) is shown
    assert ("Only the steps of solver are to be judged by how it ended." in text) is (show == "last")
    assert needs_outcome(service.coach, episode.actions[0], "somebody else")


# -- calls that are shared -----------------------------------------------------------------------------------------


def test_a_shared_call_is_cancelled_with_the_last_that_waits_for_it():
    async def scene():
        calls, ended = SharedCalls(), []

        async def work():
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                ended.append("cancelled")
                raise

        waiting = [asyncio.create_task(calls.get("k", member, (0, 1), work)) for member in (0, 1)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        await asyncio.gather(waiting[0], return_exceptions=True)
        before = list(ended)
        waiting[1].cancel()
        await asyncio.gather(waiting[1], return_exceptions=True)
        await asyncio.sleep(0)
        return before, ended

    assert asyncio.run(scene()) == ([], ["cancelled"])


def test_a_shared_call_that_raises_does_so_to_all():
    async def scene():
        calls = SharedCalls()

        async def work():
            raise CoachError("spent")

        return await asyncio.gather(*(calls.get("k", m, (0, 1), work) for m in (0, 1)), return_exceptions=True)

    assert [str(error) for error in asyncio.run(scene())] == ["spent", "spent"]
