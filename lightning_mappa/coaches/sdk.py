"""One attempt through a vendor's SDK: its time limit, its errors in our three classes, its secrets kept."""

from __future__ import annotations

import asyncio
import email.utils
import math
import re
import time
from collections.abc import Awaitable, Iterable, Mapping
from typing import Any, NoReturn
from urllib.parse import urlsplit

from lightning_mappa.coaches.parse import one_line
from lightning_mappa.coaches.provider import FatalError, PassingError, RefusedRequestError
from lightning_mappa.errors import ConfigError

FATAL = frozenset({401, 402, 403, 404})
PASSING = frozenset({408, 409, 429})
_LATE = frozenset({408, 504})
"""Said by what waits for the server, while that may be at work."""
_NOT_REACHED = frozenset({"ConnectError", "ConnectTimeout", "PoolTimeout"})
"""What the SDKs' transports raise before anything is sent."""
_KEY = re.compile(r"\b(?:sk|pk|rk)-[\w-]{8,}|\bAIza[\w-]{10,}|(?<=[?&]key=)[^&\s]+|(?<=Bearer )\S+")
_TOO_LONG = re.compile(
    r"too long|too many tokens|context[ _](?:length|window)|maximum context|exceed\w* .*context", re.I
)


async def attempt(call: Awaitable[Any], timeout_s: float, secrets: Iterable[str] = ()) -> Any:
    """What `call` returns within `timeout_s`, counted by a monotonic clock over the whole exchange.

    Raises `PassingError`, `FatalError` or `RefusedRequestError`, their messages without any of `secrets`.
    """
    try:
        return await asyncio.wait_for(call, timeout_s)
    except TimeoutError:
        raise PassingError(f"no complete reply within {timeout_s:g} s") from None
    except Exception as error:
        # Not chained: the SDK's error carries the request, and the request carries the key.
        _raise_ours(error, secrets)


def redacted(text: str, secrets: Iterable[str] = ()) -> str:
    """`text` on one line of at most 300 characters, without `secrets` and without what looks like a key."""
    for secret in secrets:
        if secret:
            text = text.replace(secret, "…")
    return one_line(_KEY.sub("…", text), limit=300)


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds that a server asks to wait, never negative; None where it asks for nothing that makes sense."""
    for name, scale in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        value = headers.get(name)
        if value is None:
            continue
        try:
            seconds = float(value) * scale
        except ValueError:
            seconds = _until(value)
        if math.isfinite(seconds) and seconds >= 0:
            return seconds
    return None


def check_base_url(base_url: str | None, key: str) -> None:
    """Raises `ConfigError` for what is no URL, and for one that holds a password or a key."""
    if base_url is None:
        return
    parts = urlsplit(base_url)
    if parts.username or parts.password or parts.query:
        raise ConfigError(f"{key} must hold no user, password or query: keys come from the environment only")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{key} is {base_url!r}; allowed: a URL that begins with http:// or https://")


def not_a_reply(what: object) -> PassingError:
    """A proxy's page, a body of another shape: it came with status 200 and is no reply all the same."""
    return PassingError(f"the server sent no reply of the expected form: {type(what).__name__}")


def _raise_ours(error: Exception, secrets: Iterable[str]) -> NoReturn:
    status = getattr(error, "status_code", None)
    if not isinstance(status, int) or status < 400:
        said = f"{type(error).__name__}: {redacted(_cause(error), secrets)}"
        raise PassingError(said, refused=type(error.__cause__).__name__ in _NOT_REACHED) from None
    message = f"HTTP {status}: {redacted(_said(error), secrets)}"
    if status in FATAL:
        raise FatalError(message) from None
    if status in PASSING or status >= 500:
        wait = retry_after(error.response.headers) if hasattr(error, "response") else None
        limited, refused = status in (429, 503, 529), status not in _LATE
        raise PassingError(message, retry_after_s=wait, rate_limited=limited, refused=refused) from None
    raise RefusedRequestError(message, too_long=status == 413 or bool(_TOO_LONG.search(message))) from None


def _said(error: Exception) -> str:
    body = getattr(error, "body", None)
    if isinstance(body, Mapping):
        inner = body.get("error", body)
        if isinstance(inner, Mapping) and isinstance(inner.get("message"), str):
            return str(inner["message"])
    return str(error)


def _cause(error: Exception) -> str:
    """SDKs say `Connection error.` and keep what happened in the cause."""
    inner = error.__cause__
    return f"{error} {type(inner).__name__}: {inner}" if inner is not None else str(error)


def _until(date: str) -> float:
    try:
        return max(email.utils.parsedate_to_datetime(date).timestamp() - time.time(), 0.0)
    except (TypeError, ValueError, OverflowError):
        return math.nan
