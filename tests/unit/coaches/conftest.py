from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest

from lightning_mappa.coaches.anthropic import AnthropicProvider
from lightning_mappa.coaches.llm import LLMCoach
from lightning_mappa.coaches.openai_compatible import OpenAICompatibleProvider
from lightning_mappa.coaches.provider import CoachRequest, Provider
from lightning_mappa.types import Episode, Task, Verdict
from tests.fake_messages_api import KEY, MODEL, Answer, Call, FakeMessagesAPI, completion, message
from tests.unit.factories import make_action

QUICK: dict[str, Any] = {"deadline_s": 5.0, "timeout_s": 2.0, "max_wait_s": 0.05}


def make_episode(actions: int = 1, episode_id: str = "e", **fields: Any) -> Episode:
    task = Task(id="t", kind="k", prompt="1 + 2?", reference="3")
    steps = tuple(make_action(index=i, **fields) for i in range(actions))
    return Episode(id=episode_id, task=task, actions=steps, outcome=1.0, last_agent_id="solver")


@dataclass
class Service:
    """A coach and the server behind it."""

    api: FakeMessagesAPI
    coach: LLMCoach

    def score(self, episode: Episode | None = None) -> Verdict:
        return asyncio.run(self.coach.score(episode or make_episode(), 0))

    def score_all(self, episodes: int) -> list[Verdict]:
        async def both() -> list[Verdict]:
            jobs = (self.coach.score(make_episode(episode_id=f"e{i}"), 0) for i in range(episodes))
            return list(await asyncio.gather(*jobs))

        return asyncio.run(both())


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that is none, and no other way to the outside."""
    for name in ("ANTHROPIC_AUTH_TOKEN", "ANTHROPIC_BASE_URL", "ANTHROPIC_PROFILE", "ANTHROPIC_CONFIG_DIR"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    monkeypatch.setenv("ANTHROPIC_API_KEY", KEY)
    monkeypatch.setenv("OPENAI_API_KEY", KEY)


@pytest.fixture(scope="session")
def _warm_sdks() -> None:
    """Their first call imports for seconds, which no test of deadlines should see."""
    with pytest.MonkeyPatch.context() as patch, FakeMessagesAPI(_any_reply) as api:
        patch.setenv("ANTHROPIC_API_KEY", KEY)
        request = CoachRequest(call_id="w", system="w", shared="w", question="w", max_tokens=1)
        for provider in (
            AnthropicProvider(MODEL, base_url=api.url),
            OpenAICompatibleProvider("m", f"{api.url}/v1", api_key_env=None),
        ):
            asyncio.run(_ask_once(provider, request))


def _any_reply(call: Call) -> Answer:
    return message("8/10") if call.path == "/v1/messages" else completion("8/10")


async def _ask_once(provider: Provider, request: CoachRequest) -> None:
    await provider.ask(request, 60.0)
    await provider.close()


@pytest.fixture
def serve(_warm_sdks: None) -> Iterator[Callable[..., Service]]:
    """`serve(answer, **settings)`: a quick LLMCoach on Anthropic's SDK, and the loopback server it asks."""
    with ExitStack() as stack:

        def start(answer: Callable[[Call], Answer], **settings: Any) -> Service:
            api = stack.enter_context(FakeMessagesAPI(answer))
            make = settings.pop("provider", lambda url: AnthropicProvider(MODEL, base_url=url))
            coach = LLMCoach(make(api.url), **{**QUICK, **settings})
            stack.callback(coach.close)
            return Service(api, coach)

        yield start
