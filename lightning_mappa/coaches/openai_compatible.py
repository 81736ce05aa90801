"""Any server that speaks the Chat Completions API: OpenAI, Gemini's endpoint, OpenRouter, a vLLM server."""

from __future__ import annotations

import os
import re
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
    from openai import AsyncOpenAI

_FINISH = {"stop": "end", "length": "length", "content_filter": "refusal"}


class OpenAICompatibleProvider:
    """A `Provider`. Needs the extra `openai`.

    Args:
        model: as the server names it.
        base_url: up to and including its version, such as `http://127.0.0.1:8000/v1`.
        api_key_env: the environment variable that holds the key; None for a server that asks for none.
        structured: whether the server holds replies to a schema (`response_format`). Where it does not, scores
            are read from plain text as well.
        max_tokens_name: the parameter that bounds a reply; OpenAI's own models want `max_completion_tokens`.
        check_model: ask `GET /models/<model>` before the run; for servers that do not answer it, false.
    """

    def __init__(
        self,
        model: str,
        base_url: str,
        api_key_env: str | None = "OPENAI_API_KEY",
        structured: bool = True,
        max_tokens_name: str = "max_tokens",
        check_model: bool = True,
    ) -> None:
        check_base_url(base_url, "coach.provider.base_url")
        if api_key_env is not None and not re.fullmatch(r"[A-Z_][A-Z0-9_]*", api_key_env):
            # What was given is not shown: it may be the key itself.
            raise ConfigError("coach.provider.api_key_env is the name of an environment variable, not a key")
        if max_tokens_name not in ("max_tokens", "max_completion_tokens"):
            raise ConfigError(
                f"coach.provider.max_tokens_name is {max_tokens_name!r}; allowed: max_tokens, max_completion_tokens"
            )
        self.model = model
        self._base_url = base_url
        self._api_key_env = api_key_env
        self._structured = structured
        self._max_tokens_name = max_tokens_name
        self._check_model = check_model
        self._client: AsyncOpenAI | None = None

    async def check(self) -> None:
        """Raises `ConfigError` when there is no key, when it is refused, and when there is no such model."""
        async with self._new_client() as client:
            if not self._check_model:
                return
            try:
                await attempt(client.models.retrieve(self.model), 30.0, (client.api_key,))
            except (FatalError, RefusedRequestError) as error:
                raise ConfigError(f"coach.provider.model={self.model} cannot be used ({error})") from None
            except PassingError as error:
                raise ConfigError(f"coach.provider.base_url={self._base_url} cannot be asked ({error})") from None

    async def ask(self, request: CoachRequest, timeout_s: float) -> CoachReply:
        if self._client is None:
            self._client = self._new_client()
        client = self._client
        call = client.chat.completions.create(**self._arguments(request), timeout=timeout_s)
        completion = await attempt(call, timeout_s, (client.api_key,))
        return _reply(completion, structured=self._structured and request.schema is not None)

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
            self._client = None

    def _arguments(self, request: CoachRequest) -> dict[str, Any]:
        arguments: dict[str, Any] = {
            "model": self.model,
            self._max_tokens_name: request.max_tokens,
            "messages": [
                {"role": "system", "content": request.system},
                {"role": "user", "content": f"{request.shared}\n\n{request.question}"},
            ],
        }
        if self._structured and request.schema is not None:
            schema = {"name": "verdict", "strict": True, "schema": dict(request.schema)}
            arguments["response_format"] = {"type": "json_schema", "json_schema": schema}
        return arguments

    def _new_client(self) -> AsyncOpenAI:
        try:
            from openai import AsyncOpenAI
        except ModuleNotFoundError as error:
            raise ConfigError(
                "coach=openai_compatible needs the package openai: pip install 'lightning-mappa[openai]'"
            ) from error
        key = "none" if self._api_key_env is None else os.environ.get(self._api_key_env)
        if not key:
            raise ConfigError(
                f"coach=openai_compatible needs a key: set the environment variable {self._api_key_env}, "
                "or coach.provider.api_key_env=null for a server without keys"
            )
        return AsyncOpenAI(api_key=key, base_url=self._base_url, max_retries=0)


def _reply(completion: Any, *, structured: bool) -> CoachReply:
    """The SDK builds its types without validation: a page of HTML comes as str, a wrong body with no choices."""
    choices = getattr(completion, "choices", None)
    if not isinstance(choices, list) or not choices or getattr(choices[0], "message", None) is None:
        raise not_a_reply(completion)
    message, finish = choices[0].message, choices[0].finish_reason
    text, refusal = message.content, getattr(message, "refusal", None)
    if not isinstance(text, str | None) or not isinstance(finish, str):
        raise not_a_reply(completion)
    return CoachReply(
        text=text or "",
        finish="refusal" if refusal else _FINISH.get(finish, finish),
        detail=finish if finish == "content_filter" else "",
        usage=_usage(getattr(completion, "usage", None)),
        model=str(completion.model),
        request_id=getattr(completion, "_request_id", None),
        structured=structured,
    )


def _usage(usage: Any) -> Usage:
    """Servers leave out what they do not count; cached tokens are a part of `prompt_tokens`."""
    cached = _count(getattr(usage, "prompt_tokens_details", None), "cached_tokens")
    return Usage(
        input_tokens=max(_count(usage, "prompt_tokens") - cached, 0),
        cache_read_tokens=cached,
        output_tokens=_count(usage, "completion_tokens"),
        thinking_tokens=_count(getattr(usage, "completion_tokens_details", None), "reasoning_tokens"),
    )


def _count(holder: Any, name: str) -> int:
    value = getattr(holder, name, None)
    return value if isinstance(value, int) else 0
