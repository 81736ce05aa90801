"""The parts of a config made real: environment, tools, an engine in this process, and the coordinator."""

from __future__ import annotations

import asyncio
import copy
import logging
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning.pytorch import seed_everything as pl_seed_everything
from omegaconf import DictConfig
from peft import PeftModel
from transformers.utils import logging as transformers_logging

from lightning_mappa.agents import AgentFacts, LoadedAgent, Model, with_adapter
from lightning_mappa.build import build
from lightning_mappa.closing import close_all
from lightning_mappa.coaches.base import Coach, with_parts
from lightning_mappa.coaches.watch import missing_watch
from lightning_mappa.errors import ConfigError
from lightning_mappa.models.load import load_model, load_trained_tensors, trained_tensors
from lightning_mappa.rollout.coordinator import RolloutCoordinator
from lightning_mappa.rollout.engine import Engine, SamplingParams
from lightning_mappa.rollout.plan import SeatContext
from lightning_mappa.rollout.transformers_engine import ServedModel, TransformersEngine
from lightning_mappa.seeds import derive_seed
from lightning_mappa.shared_weights import agent_of, roles_of
from lightning_mappa.tasks.base import TaskSource
from lightning_mappa.tools.base import Tool
from lightning_mappa.tools.workspace import Workspaces
from lightning_mappa.workflows.base import Seat, Workflow
from lightning_mappa.workflows.conversation import ChatFormat
from lightning_mappa.workflows.prompts import PromptTemplate
from lightning_mappa.workflows.seat import AgentSeat, AgentSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """What the agents act in. Building it reads data and probes the sandbox, but loads no model."""

    workflow: Workflow
    source: TaskSource
    coach: Coach
    tools: Mapping[str, Tool]

    @property
    def isolation(self) -> dict[str, str]:
        """The tier that each tool's programs run under, for tools that run programs."""
        return {name: tier for name, tool in self.tools.items() if (tier := getattr(tool, "tier", None)) is not None}

    def close(self) -> None:
        """Ends the threads, processes and connections of task source, tools and coach."""
        close_all((self.source, *self.tools.values(), *with_parts(self.coach)))


def quiet_libraries() -> None:
    """One progress display for the run: what libraries say per model and per call stays out of it."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    for name in ("httpx", "httpx2"):  # A line per coach call.
        logging.getLogger(name).setLevel(logging.WARNING)
    # Lightning 2.6 asks torch 2.13 in a way that torch calls deprecated; a user can do nothing about it.
    warnings.filterwarnings("ignore", message=".*LeafSpec.*is deprecated")
    # DeepSpeed asks torch in an older way too, per collective; and what all ranks log is the same on each.
    warnings.filterwarnings("ignore", message=".*torch.distributed.*is deprecated")
    warnings.filterwarnings("ignore", message=".*sync_dist=True")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def seed_everything(cfg: DictConfig) -> None:
    """Fixes thread count and global generators; sampling has seeds of its own."""
    torch.set_num_threads(torch_threads(cfg))
    torch.use_deterministic_algorithms(True, warn_only=True)
    pl_seed_everything(cfg.seed, verbose=False)


def torch_threads(cfg: DictConfig) -> int:
    """Of every process that computes: what the config says, else the cores this process may use."""
    return int(cfg.runtime.num_threads or len(os.sched_getaffinity(0)))


def longest_wait_s(cfg: DictConfig) -> float:
    """For another part of the run: a rollout takes a deadline per window of episodes, its verdicts one more.

    Longer than any single thing that `runtime.deadline_s` cuts, so that what is cut is data and not the end.
    """
    data = cfg.datamodule
    episodes = data.rollout_batch_size * data.n_samples_per_prompt
    windows = -(-episodes // data.max_episodes_in_flight)
    return float(cfg.runtime.deadline_s) * (windows + 2)


def build_environment(cfg: DictConfig, *, scored: bool = False) -> Environment:
    """`scored` says that the coach will be asked for verdicts, and so has to be able to give some.

    Raises `ConfigError` for bad data, where a tool has no isolation to run in, and where the coach has no key.
    """
    coach: Coach = build(cfg.coach, "coach")
    for part in with_parts(coach) if scored else ():
        check_coach = getattr(part, "check", None)
        if check_coach is not None:
            asyncio.run(check_coach())
    tools: dict[str, Tool] = {name: build(node, f"tools.{name}") for name, node in cfg.tools.items()}
    for tool in tools.values():
        check = getattr(tool, "check", None)
        if check is not None:
            check()
    return Environment(
        workflow=build(cfg.workflow, "workflow"),
        source=build(cfg.task, "task"),
        coach=coach,
        tools=tools,
    )


def build_engine(cfg: DictConfig, agents: Mapping[str, LoadedAgent], policy_version: int = 0) -> TransformersEngine:
    """An engine with its own copy of every agent's weights.

    Agents with an adapter share one base model per `model.path` and are decoded in one batch; frozen agents
    share a model too; every other agent has its own.
    """
    shared: dict[tuple[Any, ...], Model] = {}
    served = {}
    for agent_id, agent in agents.items():
        model_cfg = cfg.agents[agent_id].model
        key: tuple[Any, ...]
        adapter = None
        if isinstance(agent.model, PeftModel):
            key, adapter = (model_cfg.path, model_cfg.dtype, "adapters"), agent_id
            base = shared.get(key) or load_model(model_cfg.path, dtype=model_cfg.dtype)
            shared[key] = with_adapter(base, model_cfg.lora, seed=0, name=agent_id)
            load_trained_tensors(shared[key], trained_tensors(agent.model), agent_id)
        else:
            key = (model_cfg.path, model_cfg.dtype, agent.facts.trained, agent_id if agent.facts.trained else None)
            shared.setdefault(key, copy.deepcopy(agent.model))
        served[agent_id] = (key, adapter)
    return TransformersEngine(
        {
            agent_id: ServedModel(
                model=shared[key],
                eos_token_ids=agents[agent_id].facts.eos_token_ids,
                context_length=agents[agent_id].facts.context_length,
                adapter=adapter,
            )
            for agent_id, (key, adapter) in served.items()
        },
        max_batch_size=cfg.engine.max_batch_size,
        policy_version=policy_version,
    )


def build_coordinator(
    cfg: DictConfig, environment: Environment, agents: Mapping[str, AgentFacts], engine: Engine
) -> RolloutCoordinator:
    """Raises `ConfigError` for a workflow whose agents are not there, or a fault in an agent's prompt template."""
    for role in environment.workflow.agent_ids:
        if role not in cfg.agents:
            raise ConfigError(f"workflow needs the agent {role!r}, no key of agents; allowed: {', '.join(cfg.agents)}")
    specs = {role: agent_spec(cfg, environment, role, agents[owner]) for role, owner in agent_of(cfg.agents).items()}

    def seat_for(agent_id: str, context: SeatContext) -> Seat:
        plan = context.plan
        step = plan.step if plan.trained_on else 0
        spec = specs[agent_id]
        return AgentSeat(
            spec=replace(spec, sampling=replace(spec.sampling, temperature=plan.temperature)),
            episode_id=context.episode_id,
            session=context.session,
            workspace=context.workspace,
            seed=lambda agent, turn: derive_seed(
                cfg.seed, plan.split, step, context.task.id, context.sample, agent, turn
            ),
            actions=context.actions,
        )

    workspaces = Workspaces()
    return RolloutCoordinator(
        workflow=environment.workflow,
        source=environment.source,
        engine=engine,
        coach=environment.coach,
        seat_for=seat_for,
        workspaces=lambda episode_id: workspaces.open(),
        max_episodes_in_flight=cfg.datamodule.max_episodes_in_flight,
        deadline_s=cfg.runtime.deadline_s,
        missing=missing_watch(cfg.coach) if _reads_scores(cfg.algorithm) else None,
    )


def _reads_scores(algorithm: DictConfig) -> bool:
    """Whether training needs a verdict at all: else any number may be missing."""
    outcome_alone = algorithm.reward == "mix" and algorithm.process_weight == 0
    return algorithm.reward != "outcome" and not outcome_alone


def agent_spec(cfg: DictConfig, environment: Environment, role: str, agent: AgentFacts) -> AgentSpec:
    """What one role is in every episode, acting with the weights of `agent`.

    Raises `ConfigError` for a fault in its prompt template.
    """
    node = cfg.agents[role]
    return AgentSpec(
        agent_id=role,
        weights=agent.agent_id if len(roles_of(cfg.agents)[agent.agent_id]) > 1 else None,
        role=node.role,
        system=node.system,
        user=PromptTemplate(node.user, agent_id=role, key=f"agents.{role}.user"),
        observation=PromptTemplate(cfg.prompts.observation, agent_id=role, key="prompts.observation"),
        chat=ChatFormat(agent.tokenizer),
        sampling=SamplingParams(max_new_tokens=node.max_new_tokens),
        context_length=agent.context_length,
        tools=tuple(environment.tools[name] for name in node.tools),
        max_turns=node.max_turns,
    )
