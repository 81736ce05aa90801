"""Roles that act with the weights of one agent, as `agents.<role>.weights` says.

Every key of `agents` is a role: a prompt, tools, turns, a seat in the episode. An agent is a set of weights with an
optimizer; its id is the key of the role that it belongs to, and others may act with it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from lightning_mappa.errors import ConfigError

DEFAULTS: Mapping[str, Any] = {
    "trained": True,
    "lr": "${optimizer.lr}",
    "model": "${model}",
    "strategy": "${strategy}",
    "devices": 1,
    "num_engines": "${engine.num_engines}",
    "tensor_parallel_size": "${engine.tensor_parallel_size}",
}
"""The keys that are an agent's and no role's → what conf/agent/default.yaml says of each."""


def agent_of(agents: Mapping[Any, Any]) -> dict[str, str]:
    """Role → the agent whose weights it acts with, in the order of the config's `agents`."""
    return {str(role): str(node.get("weights") or role) for role, node in agents.items()}


def roles_of(agents: Mapping[Any, Any]) -> dict[str, tuple[str, ...]]:
    """Agent → the roles that act with its weights; agents and roles in the order of the config's `agents`."""
    owners = agent_of(agents)
    return {
        agent: tuple(role for role, owner in owners.items() if owner == agent)
        for agent in owners
        if owners[agent] == agent
    }


def with_shared_keys(agents: Mapping[str, Any]) -> dict[str, Any]:
    """The config's `agents`, not resolved, with the agent's own value in every role for the keys in `DEFAULTS`.

    Raises `ConfigError` for `weights` that name no agent, and for a role with `weights` that sets such a key itself.
    """
    return {role: _with_keys_of_owner(role, node, agents) for role, node in agents.items()}


def _with_keys_of_owner(role: str, node: Any, agents: Mapping[str, Any]) -> Any:
    owner = node.get("weights") if isinstance(node, Mapping) else None
    if owner is None:
        return node
    key = f"agents.{role}.weights"
    _check_owner(key, role, owner, agents)
    shared = agents[owner]
    for name, default in DEFAULTS.items():
        given = node.get(name, default)
        if given not in (default, shared.get(name)):
            raise ConfigError(
                f"agents.{role}.{name} is {given}, but {key}={owner}: roles that share weights are trained as one "
                f"agent; take it out, or set agents.{owner}.{name}"
            )
    return {**node, **{name: copy.deepcopy(shared[name]) for name in DEFAULTS if name in shared}}


def _check_owner(key: str, role: str, owner: Any, agents: Mapping[str, Any]) -> None:
    others = [other for other, node in agents.items() if other != role and not _names_another(node)]
    allowed = f"allowed: null, {', '.join(others)}" if others else "allowed: null"
    if owner == role:
        raise ConfigError(f"{key} names {owner!r} itself, whose weights are its own; {allowed}")
    if not isinstance(agents.get(owner), Mapping):
        raise ConfigError(f"{key} names {owner!r}, no key of agents; {allowed}")
    if _names_another(agents[owner]):
        raise ConfigError(
            f"{key} names {owner!r}, which acts with the weights of {agents[owner]['weights']!r} itself; {allowed}"
        )


def _names_another(node: Any) -> bool:
    return isinstance(node, Mapping) and node.get("weights") is not None
