"""The agents of a config: what the run knows of each without its weights, and the weights they start with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lightning_mappa.models.load import (
    add_adapter,
    context_limit,
    load_config,
    load_model,
    load_tokenizer,
    turn_end_ids,
)
from lightning_mappa.seeds import derive_seed
from lightning_mappa.shared_weights import roles_of

Model = PreTrainedModel | PeftModel


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentFacts:
    """What parts that hold no weights need to know of an agent."""

    agent_id: str
    tokenizer: PreTrainedTokenizerBase
    trained: bool
    context_length: int
    eos_token_ids: frozenset[int]
    """Every id that ends a turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedAgent:
    """One agent's start: what its Trainer trains, or what is only served when frozen."""

    facts: AgentFacts
    model: Model

    @property
    def agent_id(self) -> str:
        return self.facts.agent_id


def agent_facts(cfg: DictConfig) -> dict[str, AgentFacts]:
    """Of every agent with weights of its own, in the order of the config. Loads tokenizers but no weights."""
    tokenizers: dict[str, PreTrainedTokenizerBase] = {}
    facts = {}
    for agent_id in roles_of(cfg.agents):
        agent = cfg.agents[agent_id]
        path = agent.model.path
        if path not in tokenizers:
            tokenizers[path] = load_tokenizer(path)
        config, generation_config = load_config(path)
        facts[agent_id] = AgentFacts(
            agent_id=agent_id,
            tokenizer=tokenizers[path],
            trained=agent.trained,
            context_length=context_limit(config, agent.model.context_length),
            eos_token_ids=turn_end_ids(config, generation_config, tokenizers[path]),
        )
    return facts


def load_agents(cfg: DictConfig) -> dict[str, LoadedAgent]:
    """Every agent's model as it is at policy version 0, the same for the same seed."""
    return {agent_id: load_agent(cfg, facts) for agent_id, facts in agent_facts(cfg).items()}


def load_agent(cfg: DictConfig, facts: AgentFacts) -> LoadedAgent:
    """One agent's model at policy version 0."""
    node = cfg.agents[facts.agent_id].model
    model: Model = load_model(node.path, dtype=node.dtype)
    if node.lora is not None and facts.trained:
        model = with_adapter(model, node.lora, seed=derive_seed(cfg.seed, "adapter", facts.agent_id))
    return LoadedAgent(facts=facts, model=model)


def with_adapter(model: Model, lora: Mapping[str, Any], *, seed: int, name: str = "default") -> PeftModel:
    """`add_adapter` with the values of a config's `lora` node."""
    targets = lora["target_modules"]
    return add_adapter(
        model,
        r=lora["r"],
        alpha=lora["alpha"],
        dropout=lora["dropout"],
        target_modules=targets if isinstance(targets, str) else list(targets),
        seed=seed,
        name=name,
    )
