"""What providers send, what they make of replies, and that keys stay where they are."""

from __future__ import annotations

import asyncio
import logging
import traceback

import pytest

from lightning_mappa.coaches.anthropic import AnthropicProvider
from lightning_mappa.coaches.openai_compatible import OpenAICompatibleProvider
from lightning_mappa.coaches.parse import verdict_schema
from lightning_mappa.coaches.provider import (
    CoachReply,
    CoachRequest,
    FatalError,
    PassingError,
    RefusedRequestError,
    Usage,
)
from lightning_mappa.coaches.sdk import redacted
from lightning_mappa.errors import ConfigError
from tests.fake_messages_api import KEY, MODEL, Answer, FakeMessagesAPI, completion, error, message

REQUEST = CoachRequest(
    call_id="c", system="sys", shared="shared", question="q", max_tokens=9, schema=verdict_schema("integer")
)
PLAIN = CoachRequest(call_id="c", system="sys", shared="shared", question="q", max_tokens=9)


def ask(provider, request=REQUEST) -> CoachReply:
    async def once() -> CoachReply:
        try:
            return await provider.ask(request, 5.0)
        finally:
            await provider.close()

    return asyncio.run(once())


def anthropic(url: str) -> AnthropicProvider:
    return AnthropicProvider(MODEL, base_url=url)


def compatible(url: str, **settings) -> OpenAICompatibleProvider:
    return OpenAICompatibleProvider("m", f"{url}/v1", **settings)


def test_anthropic_reply():
    with FakeMessagesAPI(lambda call: message('{"score": 7}', thinking=True)) as api:
        reply = ask(anthropic(api.url))
    usage = Usage(input_tokens=100, cache_read_tokens=1000, cache_write_tokens=10, output_tokens=20, thinking_tokens=5)
    assert reply == CoachReply(
        text='{"score": 7}', finish="end", usage=usage, model=MODEL, request_id="req_1", structured=True
    )


def test_anthropic_effort_and_plain_text():
    with FakeMessagesAPI(lambda call: message("8/10")) as api:
        assert not ask(AnthropicProvider(MODEL, effort="low", base_url=api.url), PLAIN).structured
        assert api.calls[0].body["output_config"] == {"effort": "low"}
    with pytest.raises(ConfigError, match=r"coach.provider.effort is 'huge'; allowed: low, medium, high, xhigh, max"):
        AnthropicProvider(MODEL, effort="huge")


def test_compatible_reply_and_request():
    with FakeMessagesAPI(lambda call: completion('{"score": 7}')) as api:
        reply = ask(compatible(api.url))
        body = api.calls[0].body
    assert reply.usage == Usage(input_tokens=100, cache_read_tokens=10, output_tokens=20)
    assert (reply.finish, reply.model, reply.structured) == ("end", "m", True)
    assert [turn["content"] for turn in body["messages"]] == ["sys", "shared\n\nq"]
    assert body["response_format"]["json_schema"]["schema"] == verdict_schema("integer")
    assert body["max_tokens"] == 9


def test_compatible_server_without_schemas_usage_or_key():
    with FakeMessagesAPI(lambda call: completion("8/10", usage=None)) as api:
        reply = ask(compatible(api.url, structured=False, api_key_env=None, max_tokens_name="max_completion_tokens"))
        body = api.calls[0].body
    assert "response_format" not in body
    assert body["max_completion_tokens"] == 9
    assert (reply.structured, reply.usage) == (False, Usage())
    assert not reply.usage.known


@pytest.mark.parametrize(
    ("answer", "finish", "detail"),
    [
        (completion("x", finish_reason="length"), "length", ""),
        (completion(None, finish_reason="content_filter"), "refusal", "content_filter"),
        (
            completion(None, choices=[{"index": 0, "finish_reason": "stop", "message": {"refusal": "I will not"}}]),
            "refusal",
            "",
        ),
        (completion(None, finish_reason="tool_calls"), "tool_calls", ""),
    ],
)
def test_compatible_finish_reasons(answer, finish, detail):
    with FakeMessagesAPI(lambda call: answer) as api:
        reply = ask(compatible(api.url))
    assert (reply.finish, reply.detail) == (finish, detail)


@pytest.mark.parametrize("make", [anthropic, compatible])
def test_check_finds_the_model_or_says_that_there_is_none(make):
    with FakeMessagesAPI(lambda call: message("x")) as api:
        asyncio.run(make(api.url).check())
        unknown = make(api.url)
        unknown.model = "gone"
        with pytest.raises(ConfigError, match=r"coach.provider.model=gone cannot be used .*HTTP 404"):
            asyncio.run(unknown.check())
        assert not api.calls, "a check costs nothing"


@pytest.mark.parametrize("make", [anthropic, compatible])
def test_no_key_is_one_sentence(make, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("ANTHROPIC_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name)
    with pytest.raises(ConfigError, match=r"^coach=\w+ needs a key: set the environment variable \w+_API_KEY"):
        asyncio.run(make("http://127.0.0.1:9").check())


LEAKY = (
    (error(401, "authentication_error", f"invalid x-api-key {KEY}"), FatalError),
    (error(400, "invalid_request_error", f"header Bearer {KEY}"), RefusedRequestError),
    (error(500, "api_error", f"at https://api/?key={KEY}&x=1"), PassingError),
    (Answer(status=502, body=f"<pre>authorization: Bearer {KEY}</pre>".encode()), PassingError),
)


@pytest.mark.parametrize("make", [anthropic, compatible])
@pytest.mark.parametrize(("answer", "kind"), LEAKY)
def test_key_is_in_no_exception_and_no_log(make, answer, kind, caplog):
    caplog.set_level(logging.DEBUG)
    with FakeMessagesAPI(lambda call: answer) as api, pytest.raises(kind) as raised:
        ask(make(api.url))
    shown = "".join(traceback.format_exception(raised.value))
    assert "HTTP" in shown
    assert KEY not in shown + repr(raised.value) + caplog.text


def test_what_looks_like_a_key_is_left_out_whoever_it_belongs_to():
    text = f"a {KEY} b sk-proj-abcdefgh12345 c AIzaSyA-1234567890 d https://x/?key=abc&y=1 e my-secret"
    assert redacted(text, ["my-secret"]) == "a … b … c … d https://x/?key=…&y=1 e …"


def test_key_in_a_config_is_refused_and_not_repeated():
    for refused in (
        lambda: AnthropicProvider(MODEL, base_url=f"https://user:{KEY}@host"),
        lambda: OpenAICompatibleProvider("m", f"https://host/v1?key={KEY}"),
        lambda: OpenAICompatibleProvider("m", "https://host/v1", api_key_env=KEY),
    ):
        with pytest.raises(ConfigError) as error:
            refused()
        assert KEY not in str(error.value)


@pytest.mark.parametrize("url", ["", "localhost:8000/v1", "ftp://host/v1"])
def test_what_is_no_url_is_refused(url):
    with pytest.raises(ConfigError, match=r"coach.provider.base_url is .*; allowed: a URL"):
        OpenAICompatibleProvider("m", url)
