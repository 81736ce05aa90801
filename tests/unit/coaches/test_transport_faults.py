"""What goes wrong between a coach and its service, through the real SDK and a real server on loopback."""

from __future__ import annotations

import asyncio
import email.utils
import itertools
import json
import socket
import time

import pytest

from lightning_mappa.coaches.anthropic import AnthropicProvider
from lightning_mappa.coaches.guard import LOG, BudgetGuard
from lightning_mappa.coaches.openai_compatible import OpenAICompatibleProvider
from lightning_mappa.coaches.sdk import retry_after
from lightning_mappa.errors import CoachError
from tests.fake_messages_api import MODEL, Answer, Call, completion, error, message, verdict
from tests.unit.coaches.calls import PRICES
from tests.unit.coaches.conftest import Service, make_episode


def good(call: Call) -> Answer:
    return message(verdict(call, 7))


def then_good(*faults: Answer):
    """An answer function: the faults in turn, then good replies."""
    return lambda call: faults[call.number] if call.number < len(faults) else good(call)


def always(fault: Answer):
    return lambda call: fault


HTML = Answer(body=b"<html>sign in</html>", headers={"content-type": "text/html"})

PASSING = {
    "1 429 with a short retry-after": error(429, "rate_limit_error", retry_after="0.01"),
    "2 529 with a long retry-after": error(529, "overloaded_error", retry_after="3600"),
    "2 429 that lets the SDK retry": error(429, "rate_limit_error", retry_after="0.01", x_should_retry="true"),
    "4 500 once": error(500, "api_error"),
    "4 408": error(408, "timeout_error"),
    "4 409": error(409, "conflict_error"),
    "11 cut in the middle of the body": Answer(body={"id": "msg_1", "content": []}, cut_after=5),
    "12 200 with HTML": HTML,
    "12 200 with half a JSON": Answer(body=b'{"id": "msg_1", "cont'),
    "12 200 with another shape": Answer(body={"ok": True}),
    "12 200 with a list": Answer(body=[1]),
    "12 200 without a body": Answer(body=b""),
    "12 200 with content null": message(None, content=None),
    "12 200 with text null": message(None, content=[{"type": "text", "text": None}]),
    "12 200 without usage": message("x", usage=None),
    "12 200 with bytes that are no UTF-8": Answer(body=b'{"id": "\xff\xff"}'),
    "14 retry-after is a date long past": error(503, "api_error", retry_after="Thu, 01 Jan 1970 00:00:00 GMT"),
    "14 retry-after is a date far ahead": error(503, "api_error", retry_after="Thu, 01 Jan 2099 00:00:00 GMT"),
    "19 headers are garbage": error(429, "rate_limit_error", retry_after="soon", retry_after_ms="NaN"),
    "19 headers are missing": error(429, "rate_limit_error"),
}


@pytest.mark.parametrize("fault", PASSING.values(), ids=PASSING.keys())
def test_passing_fault_costs_one_more_attempt_and_no_score(serve, fault):
    service = serve(then_good(fault))
    started = time.monotonic()
    assert service.score().score == 7
    assert len(service.api.calls) == 2
    assert time.monotonic() - started < 2.0, "a pause was longer than max_wait_s allows"
    assert service.coach.counts["retries"] == 1


def test_fault_that_stays_is_a_missing_verdict_with_its_reason(serve):
    service = serve(always(error(500, "api_error", "down")), max_attempts=3)
    verdict = service.score()
    assert (verdict.score, verdict.reason) == (None, "no reply: HTTP 500: down")
    assert len(service.api.calls) == 3


def test_3_storm_leaves_single_probes_and_ends_without_invented_scores(serve):
    until = time.monotonic() + 0.8
    storm = error(529, "overloaded_error")
    service = serve(
        lambda call: storm if call.at < until else good(call), max_concurrency=16, max_attempts=1000, max_wait_s=0.1
    )
    assert {verdict.score for verdict in service.score_all(24)} == {7}
    late = [call for call in service.api.calls if until - 0.3 < call.at < until]
    assert len(late) < 16, "with a limit of one, calls are probes"
    assert len(service.api.calls) < 24 + 120


def test_1_one_429_slows_all_calls(serve):
    refusal = error(429, "rate_limit_error", retry_after="0.4")
    service = serve(then_good(refusal), max_concurrency=2, max_wait_s=5)
    assert {verdict.score for verdict in service.score_all(10)} == {7}
    begun = sorted(call.at - service.api.calls[0].at for call in service.api.calls)
    under_way_already = [at for at in begun if at < 0.2]
    assert not [at for at in begun if 0.2 < at < 0.35]
    assert len(under_way_already) < 9


def test_5_refused_request_is_not_sent_again(serve):
    service = serve(always(error(400, "invalid_request_error", "bad parameter")))
    assert service.score().reason == "the request was refused: HTTP 400: bad parameter"
    assert len(service.api.calls) == 1


def test_5_three_identical_refusals_stop_the_run(serve):
    service = serve(always(error(400, "invalid_request_error", "bad parameter")))
    assert service.score().score is None
    assert service.score().score is None
    with pytest.raises(CoachError, match="refuses call after call: HTTP 400: bad parameter"):
        service.score()
    with pytest.raises(CoachError):
        service.score()
    assert len(service.api.calls) == 3


def test_5_no_refusal_is_billed_nor_the_last_one(serve):
    guard = BudgetGuard(model=MODEL, prices={MODEL: PRICES}, budget_usd=1)
    service = serve(always(error(400, "invalid_request_error", "bad parameter")), guard=guard)
    for _ in range(2):
        assert service.score().score is None
    with pytest.raises(CoachError):
        service.score()
    figures = service.coach.summary()
    assert (figures["calls"], figures["failed"], figures["usd"], len(service.api.calls)) == (3, 3, 0.0, 3)


@pytest.mark.parametrize(
    ("status", "kind"), [(401, "authentication_error"), (400, "invalid_request_error")], ids=["at once", "third time"]
)
def test_6_paid_calls_in_flight_are_logged_when_another_ends_the_run(serve, tmp_path, status, kind):
    """Some are refused at once, while slower ones are under way; a run that goes on pays for none of those again."""
    refused = 1 if status == 401 else 3

    def answer(call: Call) -> Answer:
        body = good(call).body
        return error(status, kind) if call.number < refused else Answer(body=body, delay_s=0.5)

    def make() -> Service:
        service = serve(answer, guard=BudgetGuard(model=MODEL, prices={MODEL: PRICES}, budget_usd=1))
        service.coach.bind(tmp_path)
        return service

    service = make()
    with pytest.raises(CoachError):
        service.score_all(8)
    service.coach.close()
    left = len(service.api.calls)
    assert refused < left <= 8
    lines = [json.loads(line) for line in (tmp_path / LOG).read_text().splitlines()]
    assert [line["outcome"] for line in lines].count("paid") == left - refused
    again = make()
    again.coach.close()
    assert again.coach.summary()["calls_lost_in_flight"] == 0
    resumed = serve(good, guard=BudgetGuard(model=MODEL))
    resumed.coach.bind(tmp_path)
    assert {verdict.score for verdict in resumed.score_all(8)} == {7}
    assert len(resumed.api.calls) == 8 - (left - refused)


def test_5_refusals_that_differ_do_not(serve):
    answers = [error(400, "invalid_request_error", word) for word in ("a", "a", "b", "a", "a")]
    service = serve(lambda call: answers[call.number])
    assert [service.score().score for _ in range(5)] == [None] * 5


@pytest.mark.parametrize(
    "fault",
    [
        error(413, "request_too_large"),
        error(400, "invalid_request_error", "prompt is too long: 200001 tokens > 200000 maximum"),
    ],
)
def test_5_8_too_long_is_shrunk_once(serve, fault):
    episode = make_episode(text="A" * 20_000)
    service = serve(then_good(fault), max_chars=10_000)
    assert service.score(episode).score == 7
    first, second = (str(call.body["messages"]).count("A") for call in service.api.calls)
    assert 10_000 <= first < 10_050
    assert 5_000 <= second < 5_050
    assert service.coach.counts["shrunk"] == 1

    service = serve(always(fault))
    assert service.score(episode).score is None
    assert len(service.api.calls) == 2


@pytest.mark.parametrize(
    ("status", "kind"),
    [(401, "authentication_error"), (402, "billing_error"), (403, "permission_error"), (404, "not_found_error")],
)
def test_6_7_fatal_error_stops_the_run_at_once(serve, status, kind):
    service = serve(always(error(status, kind, "no way")))
    with pytest.raises(CoachError, match=f"cannot be asked: HTTP {status}: no way; mend it and go on with resume"):
        service.score()
    assert len(service.api.calls) == 1
    assert CoachError.exit_code == 4


def unused_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize("url", [f"http://127.0.0.1:{unused_port()}", "http://no-such-host.invalid"])
def test_9_no_connection_is_tried_again_within_the_deadline(serve, url):
    service = serve(good, provider=lambda _: AnthropicProvider(MODEL, base_url=url), max_attempts=4)
    assert service.score().reason.startswith("no reply: APIConnectionError")
    assert service.coach.counts["attempts"] == 4


def test_9_tls_fault(serve):
    service = serve(
        good, provider=lambda url: AnthropicProvider(MODEL, base_url=url.replace("http:", "https:")), max_attempts=2
    )
    assert service.score().score is None
    assert service.coach.counts["attempts"] == 2


def test_10_hanging_server_ends_by_the_attempt_and_by_the_total_deadline(serve):
    service = serve(always(Answer(body={}, delay_s=3)), timeout_s=0.2, deadline_s=0.7)
    started = time.monotonic()
    assert service.score().reason.startswith("no reply: deadline of 0.7 s, no complete reply within 0.")
    assert 0.2 < time.monotonic() - started < 1.5
    assert 2 <= len(service.api.calls) <= 4


@pytest.mark.parametrize(
    "queue",
    [{"max_concurrency": 1}, {"requests_per_minute": 60.0}],
    ids=["its turn", "the rate"],
)
def test_10_no_attempt_starts_when_too_little_time_is_left(serve, queue):
    """Calls that fail and have to queue for another attempt, past what the deadline leaves."""
    guard = BudgetGuard(model=MODEL, prices={MODEL: PRICES}, budget_usd=1)
    down = error(500, "api_error", "down")

    def answer(call: Call) -> Answer:
        return Answer(body=down.body, status=500, delay_s=0.4) if call.number < 2 else down

    service = serve(answer, timeout_s=1.0, deadline_s=0.6, guard=guard, **queue)
    verdicts = service.score_all(2)
    assert {verdict.score for verdict in verdicts} == {None}
    assert {verdict.reason for verdict in verdicts} == {"no reply: deadline of 0.6 s, HTTP 500: down"}
    assert len(service.api.calls) == service.coach.summary()["calls"] == service.coach.counts["attempts"]
    assert service.coach.summary()["usd"] == 0
    assert 2 <= len(service.api.calls) < 2 * 8


def test_10_dripping_server_does_not_outwit_the_timeout(serve):
    service = serve(always(Answer(body=message("x").body, drip_s=0.05)), timeout_s=0.3, max_attempts=1)
    started = time.monotonic()
    assert service.score().score is None
    assert time.monotonic() - started < 1.0


def test_13_late_reply_is_dropped_and_the_next_one_counts(serve):
    def answer(call: Call) -> Answer:
        late = message(verdict(call, 1))
        return Answer(body=late.body, delay_s=0.5) if call.number == 0 else good(call)

    service = serve(answer, timeout_s=0.25)
    assert service.score().score == 7
    time.sleep(0.4)
    assert service.score().score == 7


def test_14_wait_is_never_longer_than_the_cap_whatever_the_clock_says(monkeypatch):
    for now in (0.0, 4e9):
        monkeypatch.setattr(time, "time", lambda now=now: now)
        for value in (email.utils.formatdate(1e9), "-5", "1e400", "NaN", "", "x", "86400"):
            wait = retry_after({"retry-after": value})
            assert wait is None or wait >= 0
    assert retry_after({"retry-after-ms": "1500", "retry-after": "7"}) == 1.5
    assert retry_after({"retry-after-ms": "x", "retry-after": "7"}) == 7


def test_18_proxy_set_later_is_not_used(serve, monkeypatch):
    service = serve(good)
    assert service.score().score == 7
    monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{unused_port()}")
    assert service.score().score == 7


def test_sdk_does_not_retry_by_itself(serve):
    service = serve(always(error(500, "api_error")), max_attempts=1)
    service.score()
    assert len(service.api.calls) == 1


def test_cancelled_call_is_cancelled_at_the_service_and_frees_its_slot(serve):
    slow = itertools.chain([3.0], itertools.repeat(0.0))
    service = serve(lambda call: Answer(body=good(call).body, delay_s=next(slow)), max_concurrency=1)

    async def cut() -> None:
        async with asyncio.timeout(0.2):
            await service.coach.score(make_episode(), 0)

    with pytest.raises(TimeoutError):
        asyncio.run(cut())
    assert service.score().score == 7


OPENAI_PASSING = {
    "HTML": HTML,
    "no choices": completion("x", choices=[]),
    "another shape": Answer(body={"ok": True}),
    "no message": completion("x", choices=[{"index": 0, "finish_reason": "stop"}]),
    "429": Answer(status=429, body={"error": {"message": "slow down"}}, headers={"retry-after": "3600"}),
    "500": Answer(status=500, body={"error": {"message": "down"}}),
}


@pytest.mark.parametrize("fault", OPENAI_PASSING.values(), ids=OPENAI_PASSING.keys())
def test_passing_faults_of_compatible_servers(serve, fault):
    service = serve(
        lambda call: fault if call.number == 0 else completion(verdict(call, 7)),
        provider=lambda url: OpenAICompatibleProvider("m", f"{url}/v1"),
    )
    assert service.score().score == 7
    assert len(service.api.calls) == 2
