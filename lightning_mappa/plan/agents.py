"""What each agent of a config will need: its model, its sequences, its batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from omegaconf import DictConfig

from lightning_mappa.build import check_target
from lightning_mappa.errors import ConfigError
from lightning_mappa.plan.arithmetic import (
    AgentBatch,
    RunBatches,
    agent_batch,
    evaluations_of,
    longest_sequence,
    rows_per_forward,
    turns_of,
)
from lightning_mappa.plan.memory import TrainerShape
from lightning_mappa.plan.model_facts import ModelFacts, model_facts
from lightning_mappa.shared_weights import roles_of

TASK_TOKENS = 1024
TOOL_TOKENS = 2_000
"""Of a turn's tool output: two streams of 4,000 characters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolePlan:
    """Who acts with an agent's weights."""

    role: str
    turns: int
    """Actions in one episode, at most."""
    max_new_tokens: int
    with_tools: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentPlan:
    agent_id: str
    roles: tuple[RolePlan, ...]
    trained: bool
    model: str
    facts: ModelFacts
    lora_parameters: int
    context_length: int
    task_tokens: int
    """The longest prompt of its first action."""
    longest: int
    """Most tokens of a prompt with its response."""
    batch: AgentBatch
    shape: TrainerShape | None
    """None: frozen."""

    @property
    def sync_bytes(self) -> int:
        """What one engine is sent after every step."""
        return 0 if self.shape is None else self.shape.trained * self.shape.trained_bytes


def plan_agents(cfg: DictConfig) -> tuple[tuple[AgentPlan, ...], RunBatches]:
    """Raises `ConfigError` for a model that nothing is known of, or a context that is too short for it."""
    data, steps = cfg.datamodule, cfg.trainer.max_steps
    order = cfg.workflow.get("order")
    turns = turns_of(list(cfg.agents), {name: agent.max_turns for name, agent in cfg.agents.items()}, order)
    episodes = data.rollout_batch_size * data.n_samples_per_prompt
    reference = _has_kl_penalty(cfg)
    agents = tuple(
        _agent(cfg, agent_id, roles, turns, episodes, reference) for agent_id, roles in roles_of(cfg.agents).items()
    )
    evaluations = evaluations_of(steps, cfg.trainer.val_check_interval)
    batches = RunBatches(
        prompts=data.rollout_batch_size,
        samples_per_prompt=data.n_samples_per_prompt,
        steps=steps,
        agents={agent.agent_id: agent.batch for agent in agents},
        evaluations=evaluations,
        judged_in_evaluations=_judged_in_evaluations(data, evaluations),
    )
    return agents, batches


def _judged_in_evaluations(data: DictConfig, evaluations: int) -> int | None:
    if not data.val_scored:
        return 0
    return None if data.val_limit is None else int(evaluations * data.val_limit * data.val_n_samples)


def _agent(
    cfg: DictConfig, agent_id: str, roles: Sequence[str], turns: Mapping[str, int], episodes: int, reference: bool
) -> AgentPlan:
    node, key = cfg.agents[agent_id], f"agents.{agent_id}"
    facts = model_facts(node.model.path)
    context = _context(facts, node.model.context_length, f"{key}.model")
    task_tokens = _task_tokens(cfg, agent_id, roles, context)
    lora = node.model.lora
    adapter = 0 if lora is None else facts.lora_parameters(lora.r, lora.target_modules)
    if lora is not None and adapter == 0:
        raise ConfigError(f"{key}.model.lora.target_modules is {lora.target_modules}: no such layer in the model")
    tool_turns = sum(count for name, count in turns.items() if cfg.agents[name].tools)
    longest = longest_sequence(
        context,
        task_tokens,
        [count * cfg.agents[name].max_new_tokens for name, count in turns.items()],
        tool_turns=tool_turns,
        tokens_per_tool_output=TOOL_TOKENS,
    )
    algorithm = cfg.algorithm
    own_turns = sum(turns[role] for role in roles)
    mini = min(algorithm.mini_batch_size, episodes * max(own_turns, 1))
    rows = rows_per_forward(algorithm.micro_batch_size, algorithm.micro_batch_tokens, longest, mini)
    return AgentPlan(
        agent_id=agent_id,
        roles=tuple(
            RolePlan(
                role=role,
                turns=turns[role],
                max_new_tokens=cfg.agents[role].max_new_tokens,
                with_tools=bool(cfg.agents[role].tools),
            )
            for role in roles
        ),
        trained=node.trained,
        model=node.model.path,
        facts=facts,
        lora_parameters=adapter,
        context_length=context,
        task_tokens=task_tokens,
        longest=longest,
        batch=agent_batch(
            episodes=episodes,
            turns=own_turns,
            trained=node.trained,
            mini_batch_size=algorithm.mini_batch_size,
            ranks=node.devices,
            rows_per_forward=rows,
        ),
        shape=_shape(cfg, node, facts, adapter, reference, rows, longest) if node.trained else None,
    )


def _shape(
    cfg: DictConfig, node: DictConfig, facts: ModelFacts, adapter: int, reference: bool, rows: int, longest: int
) -> TrainerShape:
    return TrainerShape(
        facts=facts,
        strategy=node.strategy,
        ranks=node.devices,
        dtype=node.model.dtype,
        bf16=cfg.trainer.precision == "bf16-mixed",
        lora_parameters=adapter,
        reference=reference,
        checkpointing=node.model.gradient_checkpointing,
        rows=rows,
        tokens=rows * longest,
        chunk=cfg.algorithm.logprob_chunk_size,
        on_gpu=cfg.trainer.accelerator == "cuda",
    )


def _task_tokens(cfg: DictConfig, agent_id: str, roles: Sequence[str], context: int) -> int:
    """The longest prompt of a first action, whoever of the roles takes it."""
    longest = 0
    for role in roles:
        new = int(cfg.agents[role].max_new_tokens)
        tokens = int(cfg.plan.task_tokens or max(1, min(TASK_TOKENS, context - new)))
        if tokens + new > context:
            raise ConfigError(
                f"agents.{role}: a prompt of {tokens} tokens and {new} new ones do not fit a context of {context}; "
                f"raise agents.{agent_id}.model.context_length, or lower agents.{role}.max_new_tokens or "
                "plan.task_tokens"
            )
        longest = max(longest, tokens)
    return longest


def _context(facts: ModelFacts, override: int | None, key: str) -> int:
    if override is None and facts.max_positions is None:
        raise ConfigError(f"{key}.context_length has no value and the model's config names no limit: set one")
    if override is not None and facts.max_positions is not None and override > facts.max_positions:
        raise ConfigError(f"{key}.context_length is {override}; allowed: 2 to {facts.max_positions}")
    return override or facts.max_positions or 0


def _has_kl_penalty(cfg: DictConfig) -> bool:
    from lightning_mappa.callbacks.kl_penalty import KLPenalty

    targets = [check_target(node, f"callbacks.{name}") for name, node in cfg.callbacks.items()]
    return any(isinstance(target, type) and issubclass(target, KLPenalty) for target in targets)
