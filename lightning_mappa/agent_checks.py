"""Rules for the agents of a config, each with one sentence."""

from __future__ import annotations

from omegaconf import DictConfig

from lightning_mappa.algorithm.choices import check_choice
from lightning_mappa.bounds import CHOICES, DTYPES, check_bound
from lightning_mappa.errors import ConfigError
from lightning_mappa.shared_weights import roles_of


def check_agents(cfg: DictConfig) -> None:
    """Agents by themselves, agents that share a base model, and the order they act in."""
    if not any(agent.trained for agent in cfg.agents.values()):
        raise ConfigError(f"no agent is trained: set agents.<name>.trained=true for one of {', '.join(cfg.agents)}")
    bases: dict[str, tuple[str, DictConfig]] = {}
    for role, node in cfg.agents.items():
        _check_role(f"agents.{role}", node, cfg.tools)
    for agent_id in roles_of(cfg.agents):
        key, agent = f"agents.{agent_id}", cfg.agents[agent_id]
        _check_agent(key, agent)
        first_key, first = bases.setdefault(agent.model.path, (key, agent.model))
        if (first.lora is None) != (agent.model.lora is None) or first.dtype != agent.model.dtype:
            raise ConfigError(
                f"{first_key}.model and {key}.model are both {agent.model.path} but differ in lora or dtype: "
                "agents on one base share it"
            )
    for agent_id in cfg.workflow.get("order") or []:
        if agent_id not in cfg.agents:
            raise ConfigError(f"workflow.order names {agent_id!r}, no key of agents; allowed: {', '.join(cfg.agents)}")


def _check_role(key: str, role: DictConfig, tools: DictConfig) -> None:
    for name in ("max_turns", "max_new_tokens"):
        check_bound(f"{key}.{name}", role[name], at_least=1)
    for name in role.tools:
        if name not in tools:
            listed = ", ".join(tools) or "none is configured"
            raise ConfigError(f"{key}.tools names {name!r}, which is no key of tools; allowed: {listed}")


def _check_agent(key: str, agent: DictConfig) -> None:
    check_bound(f"{key}.lr", agent.lr, at_least=0)
    for name in ("devices", "num_engines", "tensor_parallel_size"):
        check_bound(f"{key}.{name}", agent[name], at_least=1)
    allowed, later = CHOICES["strategy"]
    check_choice(f"{key}.strategy", agent.strategy, allowed, later=later)
    _check_model(f"{key}.model", agent.model)


def _check_model(key: str, model: DictConfig) -> None:
    check_choice(f"{key}.dtype", model.dtype, DTYPES)
    check_bound(f"{key}.context_length", model.context_length, at_least=2)
    lora = model.lora
    if lora is None:
        return
    check_bound(f"{key}.lora.r", lora.r, at_least=1)
    check_bound(f"{key}.lora.alpha", lora.alpha, at_least=1)
    if not 0 <= lora.dropout < 1:
        raise ConfigError(f"{key}.lora.dropout is {lora.dropout}; allowed: from 0 to below 1")
    modules = lora.target_modules
    if modules != "all-linear" and (isinstance(modules, str) or not modules):
        raise ConfigError(f"{key}.lora.target_modules is {modules!r}; allowed: all-linear or a list of modules")
