"""Options that take a name: what is allowed, and what is documented but not built."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from lightning_mappa.errors import ConfigError, NotAvailableError

ALGORITHM_OPTIONS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "algorithm.adv_estimator": (("reinforce_plus_plus",), ("reinforce_plus_plus_baseline", "rloo", "grpo")),
    "algorithm.policy_loss": (("ppo",), ("gspo", "cispo")),
    "algorithm.reward": (("process", "outcome", "mix"), ()),
    "algorithm.return_scope": (("trajectory", "agent", "action"), ()),
    "algorithm.return_level": (("action", "token"), ()),
    "algorithm.return_agg": (("sum", "mean"), ()),
    "algorithm.baseline": (("none", "agent_turn"), ()),
    "algorithm.norm_scope": (("all", "agent"), ()),
    "algorithm.norm_unit": (("action", "token"), ()),
    "algorithm.truncated": (("score", "mask"), ()),
    "algorithm.loss_agg_mode": (("token-mean", "seq-mean-token-mean", "seq-mean-token-sum"), ()),
}
"""Option -> (allowed values, documented values that this version does not build)."""


def check_option(key: str, value: object) -> None:
    """`check_choice` of an option in `ALGORITHM_OPTIONS`."""
    allowed, later = ALGORITHM_OPTIONS[key]
    check_choice(key, value, allowed, later=later)


def check_choice(key: str, value: object, allowed: Collection[str], *, later: Collection[str] = ()) -> None:
    """Raises `NotAvailableError` for a value in `later`, `ConfigError` for any other one not in `allowed`."""
    listed = ", ".join(allowed)
    if value in later:
        raise NotAvailableError(f"{key}={value} is not available in this version; allowed: {listed}")
    if value not in allowed:
        raise ConfigError(f"{key} is {value!r}; allowed: {listed}")
