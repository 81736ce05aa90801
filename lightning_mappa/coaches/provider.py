"""One call to a model that judges: what goes out, what comes back, and what can go wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class CoachRequest:
    """A prompt for one verdict, laid out so that what many calls share stands first and can be cached."""

    call_id: str
    """Names the call in logs; the same action asked the same way has the same id."""
    system: str
    """Rubric and rules: the same for every call of a run."""
    shared: str
    """Task, roles and files: the same for every action of an episode."""
    question: str
    """This action."""
    max_tokens: int
    """Of the reply, thinking among them."""
    schema: Mapping[str, Any] | None = None
    """The JSON schema that the reply is held to, by providers that can; None asks for plain text."""
    seed: int = 0
    """Below 2^53; another for every reply that is wanted to the same content. Providers that can draw by it, and logs
    tell replies apart by it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens as billed; input_tokens counts neither cache reads nor cache writes."""

    input_tokens: int = 0
    cache_read_tokens: int = 0
    cache_write_tokens: int = 0
    output_tokens: int = 0
    """Thinking among them."""
    thinking_tokens: int = 0

    @property
    def known(self) -> bool:
        """Whether any token was counted; every reply has some, so that one without comes from a server that does not
        say what it used."""
        return any((self.input_tokens, self.cache_read_tokens, self.cache_write_tokens, self.output_tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class CoachReply:
    """What a provider answered, before anyone reads a score out of it."""

    text: str
    """The text blocks, thinking left out."""
    finish: str
    """`end`, `length`, `refusal`, or the provider's own word for anything else."""
    detail: str = ""
    """The category of a refusal."""
    usage: Usage
    model: str
    """As the provider names it in the reply."""
    request_id: str | None = None
    structured: bool
    """The text is held to the schema by the provider, so that only JSON may be read."""


class PassingError(Exception):
    """May go away: time-outs, connection faults, 408, 409, 429, 5xx, replies that are none.

    `retry_after_s` is what the server asked for. `refused`: no work was done that one could be billed for, because the
    server said no or was not reached.
    """

    def __init__(
        self,
        message: str,
        *,
        retry_after_s: float | None = None,
        rate_limited: bool = False,
        refused: bool = False,
    ) -> None:
        super().__init__(message)
        self.refused = refused
        self.retry_after_s = retry_after_s
        self.rate_limited = rate_limited


class FatalError(Exception):
    """Concerns every call of the run: a bad key, no money, no such model."""


class RefusedRequestError(Exception):
    """Concerns this call: too long, a bad parameter. Not asked again as it is."""

    def __init__(self, message: str, *, too_long: bool = False) -> None:
        super().__init__(message)
        self.too_long = too_long


class Provider(Protocol):
    """A service that answers requests. One attempt per call; whoever calls it retries."""

    model: str

    async def check(self) -> None:
        """Raises `ConfigError` when there is no key or no such model. Costs nothing."""
        ...

    async def ask(self, request: CoachRequest, timeout_s: float) -> CoachReply:
        """Raises `PassingError`, `FatalError` or `RefusedRequestError`; never an SDK's own error."""
        ...

    async def close(self) -> None: ...


class CallGuard(Protocol):
    """Stands around every attempt of every call: budget, log of paid calls, cache.

    For each attempt `before` is awaited once. Where it returns None, `sent` follows when the call leaves, if it does,
    and then exactly one of `after` and `failed`, also when the attempt is cancelled.
    """

    async def before(self, request: CoachRequest) -> CoachReply | None:
        """A reply already paid for, or None: go and ask. Raises `CoachError` when the budget does not allow it."""
        ...

    async def sent(self, request: CoachRequest) -> None:
        """The call leaves when this returns. Raises `CoachError` where that cannot be written down."""
        ...

    async def after(self, request: CoachRequest, reply: CoachReply) -> None:
        """Books what was paid. Raises `CoachError` where it cannot be written down."""
        ...

    async def failed(self, request: CoachRequest, *, billed: bool = True) -> None:
        """The call came to no reply. `billed`: the server may have worked for it, and may bill it; False gives back
        what `before` has set aside, and so does a call that never left."""
        ...
