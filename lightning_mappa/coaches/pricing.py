"""What calls cost, in dollars that add up exactly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from decimal import Decimal
from typing import Any

from lightning_mappa.coaches.provider import CoachRequest, Usage
from lightning_mappa.errors import ConfigError

_PER_TOKEN = Decimal(1_000_000)
_UNSEEN_TOKENS = 1000
"""What a provider may put into a prompt by itself: the schema, markers between messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceTier:
    """Dollars per million tokens, for prompts of at most `up_to` tokens, whether cached or not."""

    input: Decimal
    cache_read: Decimal
    cache_write: Decimal
    output: Decimal
    """Thinking among it."""
    up_to: int | None = None
    """None: of any length."""


class Prices:
    """The price list of one model.

    Args:
        tiers: by rising `up_to`, the last without one.
    """

    def __init__(self, tiers: Sequence[PriceTier]) -> None:
        limits = [tier.up_to for tier in tiers]
        bounded = [limit for limit in limits[:-1] if limit is not None]
        if not tiers or limits[-1] is not None or len(bounded) < len(tiers) - 1 or bounded != sorted(set(bounded)):
            raise ConfigError(f"prices: up_to is {limits}; it must rise from tier to tier, and the last has none")
        self._tiers = tuple(tiers)

    @classmethod
    def of(cls, config: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> Prices:
        """From one mapping with the fields of `PriceTier`, or a list of them; `ConfigError` for anything else."""
        return cls([_tier(node) for node in ([config] if isinstance(config, Mapping) else config)])

    def cost(self, usage: Usage) -> Decimal:
        """Dollars for a call that used this."""
        tier = self._tier_for(usage.input_tokens + usage.cache_read_tokens + usage.cache_write_tokens)
        return (
            tier.input * usage.input_tokens
            + tier.cache_read * usage.cache_read_tokens
            + tier.cache_write * usage.cache_write_tokens
            + tier.output * usage.output_tokens
        ) / _PER_TOKEN

    def bound(self, request: CoachRequest) -> Decimal:
        """Dollars that no reply to the request can pass.

        A token stands for at least one byte of the prompt; a third of that is usual for prose, but numbers and
        scripts other than Latin come close. What is set aside too much comes back when the call has settled.
        """
        prompt = _UNSEEN_TOKENS + sum(len(text.encode(errors="replace")) for text in _texts(request))
        return max(
            (max(tier.input, tier.cache_write, tier.cache_read) * prompt + tier.output * request.max_tokens)
            / _PER_TOKEN
            for tier in self._reachable(prompt)
        )

    def _tier_for(self, prompt_tokens: int) -> PriceTier:
        return next(tier for tier in self._tiers if tier.up_to is None or prompt_tokens <= tier.up_to)

    def _reachable(self, prompt_tokens: int) -> Sequence[PriceTier]:
        """Tiers that a prompt of at most so many tokens may fall into."""
        return self._tiers[: self._tiers.index(self._tier_for(prompt_tokens)) + 1]


def _texts(request: CoachRequest) -> tuple[str, str, str]:
    return request.system, request.shared, request.question


def _tier(node: Any) -> PriceTier:
    names = [field.name for field in fields(PriceTier)]
    if not isinstance(node, Mapping):
        raise ConfigError(f"prices: {node!r} is no mapping of {', '.join(names)}")
    unknown, lacking = node.keys() - set(names), set(names) - {"up_to"} - node.keys()
    if unknown or lacking:
        raise ConfigError(f"prices: given {', '.join(map(str, node))}; needed {', '.join(names[:4])}, allowed up_to")
    up_to = node.get("up_to")
    if up_to is not None and (not isinstance(up_to, int) or isinstance(up_to, bool) or up_to < 1):
        raise ConfigError(f"prices.up_to={up_to!r}: must be a number of tokens, or null")
    return PriceTier(**{name: _dollars(name, node[name]) for name in names[:4]}, up_to=up_to)


def _dollars(name: str, value: Any) -> Decimal:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
        raise ConfigError(f"prices.{name}={value!r}: must be dollars per million tokens, 0 or more")
    return Decimal(str(value))
