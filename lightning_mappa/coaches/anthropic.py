"""Anthropic's Messages API through the official SDK."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lightning_mappa.coaches.provider import (
    CoachReply,
    CoachRequest,
    FatalError,
    PassingError,
    RefusedRequestError,
    Usage,
)
from lightning_mappa.coaches.sdk import attempt, check_base_url, not_a_reply
from lightning_mappa.errors import ConfigError

if TYPE_CHECKING:
    from anthropic import AsyncAnthropic

_FINISH = {"end_turn": "end", "stop_sequence": "end", "max_tokens": "length", "refusal": "refusal"}
_CACHED = {"type": "ephemeral"}


class AnthropicProvider:
    """A `Provider`. The key is what the SDK finds in the environment; it is in no config.

    Rubric and shared part end in a cache breakpoint each. Replies are held to the request's schema; thinking is
    left to the model, and `effort` bounds it.

    Args:
        model: as the Models API names it.
        effort: `low`, `medium`, `high`, `xhigh` or `max`; None leaves it to the service.
        base_url: another server that speaks the Messages API; None is Anthropic's.
    """

    def __init__(self, model: str, effort: str | None = None, base_url: str | None = None) -> None:
        efforts = ("low", "medium", "high", "xhigh", "max")
        if effort is not None and effort not in efforts:
            raise ConfigError(f"coach.provider.effort is {effort!r}; allowed: {', '.join(efforts)}, or null")
        check_base_url(base_url, "coach.provider.base_url")
        self.model = model
        self._effort = effort
        self._base_url = base_url
        self._client: AsyncAnthropic | None = None

    async def check(self) -> None:
        """Raises `ConfigError` when there is no key, when it is refused, and when there is no such model."""
        async with self._new_client() as client:
            try:
                await attempt(client.models.retrieve(self.model), 30.0, _secrets(client))
            except (FatalError, RefusedRequestError) as error:
                raise ConfigError(f"coach.provider.model={self.model} cannot be used with this key ({error})") from None
            except PassingError as error:
                raise ConfigError(f"coach.provider: {client.base_url.host} cannot be asked ({error})") from None

    async def ask(self, request: CoachRequest, timeout_s: float) -> CoachReply:
        if self._client is None:
            self._client = self._new_client()
        client = self._client
        message = await attempt(
            client.messages.create(**self._arguments(request), timeout=timeout_s), timeout_s, _secrets(client)
        )
        return _reply(message, structured=request.schema is not None)

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
            self._client = None

    def _arguments(self, request: CoachRequest) -> dict[str, Any]:
        output: dict[str, Any] = {}
        if request.schema is not None:
            output["format"] = {"type": "json_schema", "schema": dict(request.schema)}
        if self._effort is not None:
            output["effort"] = self._effort
        return {
            "model": self.model,
            "max_tokens": request.max_tokens,
            "system": [_block(request.system, cached=True)],
            "messages": [{"role": "user", "content": [_block(request.shared, cached=True), _block(request.question)]}],
            **({"output_config": output} if output else {}),
        }

    def _new_client(self) -> AsyncAnthropic:
        from anthropic import AnthropicError, AsyncAnthropic

        try:
            client = AsyncAnthropic(base_url=self._base_url, max_retries=0)
        except (AnthropicError, ValueError) as error:
            raise ConfigError(f"coach=anthropic finds no usable key ({type(error).__name__})") from None
        if client.api_key is None and client.auth_token is None and client.credentials is None:
            raise ConfigError("coach=anthropic needs a key: set the environment variable ANTHROPIC_API_KEY")
        return client


def _block(text: str, *, cached: bool = False) -> dict[str, Any]:
    return {"type": "text", "text": text, **({"cache_control": _CACHED} if cached else {})}


def _secrets(client: AsyncAnthropic) -> tuple[str, ...]:
    return tuple(secret for secret in (client.api_key, client.auth_token) if secret)


def _reply(message: Any, *, structured: bool) -> CoachReply:
    """The SDK builds its types without validation: a page of HTML comes as str, a wrong body with content None."""
    content, stop_reason = getattr(message, "content", None), getattr(message, "stop_reason", None)
    if not isinstance(content, list) or not isinstance(stop_reason, str) or message.usage is None:
        raise not_a_reply(message)
    texts = [block.text for block in content if getattr(block, "type", None) == "text"]
    if not all(isinstance(text, str) for text in texts):
        raise not_a_reply(message)
    details = getattr(message, "stop_details", None)
    return CoachReply(
        text="".join(texts),
        finish=_FINISH.get(stop_reason, stop_reason),
        detail=str(getattr(details, "category", None) or "") if stop_reason == "refusal" else "",
        usage=_usage(message.usage),
        model=str(message.model),
        request_id=getattr(message, "_request_id", None),
        structured=structured,
    )


def _usage(usage: Any) -> Usage:
    details = getattr(usage, "output_tokens_details", None)
    return Usage(
        input_tokens=_count(usage, "input_tokens"),
        cache_read_tokens=_count(usage, "cache_read_input_tokens"),
        cache_write_tokens=_count(usage, "cache_creation_input_tokens"),
        output_tokens=_count(usage, "output_tokens"),
        thinking_tokens=_count(details, "thinking_tokens"),
    )


def _count(holder: Any, name: str) -> int:
    value = holder.get(name) if isinstance(holder, Mapping) else getattr(holder, name, None)
    return value if isinstance(value, int) else 0
