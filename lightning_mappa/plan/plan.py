"""`mappa plan`: the whole run worked out, and refused where it cannot be."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lightning_mappa.console import table_console
from lightning_mappa.errors import ConfigError
from lightning_mappa.plan.agents import AgentPlan, plan_agents
from lightning_mappa.plan.arithmetic import RunBatches
from lightning_mappa.plan.cost import CoachBill, JudgedActions, coach_bills
from lightning_mappa.plan.devices import Device, devices_of
from lightning_mappa.plan.hardware import hardware_of
from lightning_mappa.plan.memory import GIB
from lightning_mappa.plan.processes import KVCache, Process, plan_processes
from lightning_mappa.plan.report import as_data, show
from lightning_mappa.shared_weights import roles_of
from lightning_mappa.system import quiet_libraries

OBJECT_STORE_GB = 2.0
"""What runtime.object_store_gb=null means."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    agents: tuple[AgentPlan, ...]
    batches: RunBatches
    processes: tuple[Process, ...]
    caches: tuple[KVCache, ...]
    devices: tuple[Device, ...]
    bills: tuple[CoachBill, ...]
    sync_bytes: int
    """That leave the trainers per step: every agent's tensors, once per engine that serves it."""
    problems: tuple[str, ...]
    """Why it cannot run, each with what to change."""
    notes: tuple[str, ...]
    """What it can do with but would do better without."""


def plan(cfg: DictConfig) -> dict[str, Any]:
    """Prints the plan and returns it as plain data. `cfg` is checked. Writes nothing and loads no weights.

    Raises:
        ConfigError: it cannot run; says what to change, all faults that show in one.
    """
    quiet_libraries()
    planned = make_plan(cfg)
    data = as_data(planned)
    if cfg.plan.json:
        print(json.dumps(data, indent=2))
    else:
        show(planned, table_console())
    if planned.problems:
        raise ConfigError("; ".join(planned.problems))
    return data


def make_plan(cfg: DictConfig) -> RunPlan:
    """Raises `ConfigError` where there is nothing to lay out: unknown models, too few GPUs, contexts too short."""
    hardware = hardware_of(cfg)
    agents, batches = plan_agents(cfg)
    processes, caches = plan_processes(cfg, agents, hardware)
    engines = {agent.agent_id: cfg.agents[agent.agent_id].num_engines for agent in agents}
    devices = devices_of(
        processes,
        nodes=hardware.cluster.nodes,
        gpu_memory=hardware.gpu_memory,
        node_memory=hardware.node_memory,
        object_store=_object_store(cfg),
        by_turns=cfg.runtime.name == "local",
        overlap=cfg.runtime.max_staleness > 0,
    )
    judged = [
        JudgedActions(
            count=batches.judged_episodes * one.turns, max_new_tokens=one.max_new_tokens, with_tools=one.with_tools
        )
        for agent in agents
        for one in agent.roles
    ]
    coach: Any = OmegaConf.to_container(cfg.coach, resolve=True)
    return RunPlan(
        agents=agents,
        batches=batches,
        processes=tuple(processes),
        caches=tuple(caches),
        devices=tuple(devices),
        bills=tuple(coach_bills(coach, judged, max(agent.task_tokens for agent in agents))),
        sync_bytes=sum(agent.sync_bytes * engines[agent.agent_id] for agent in agents),
        problems=(*_agent_problems(cfg, agents), *_cache_problems(cfg, caches), *_memory_problems(cfg, devices)),
        notes=(*_rank_notes(cfg), *_store_notes(cfg, agents), *_coach_notes(batches)),
    )


def _object_store(cfg: DictConfig) -> int:
    """Its cap, in bytes; 0 for a cluster that is joined, which has set it already."""
    if cfg.runtime.name != "ray" or cfg.runtime.address is not None:
        return 0
    return int((cfg.runtime.object_store_gb or OBJECT_STORE_GB) * GIB)


def _agent_problems(cfg: DictConfig, agents: Sequence[AgentPlan]) -> Iterator[str]:
    mini_batch = cfg.algorithm.mini_batch_size
    for agent in agents:
        key, node, facts = f"agents.{agent.agent_id}", cfg.agents[agent.agent_id], agent.facts
        workers = node.tensor_parallel_size
        if facts.heads % workers or (facts.kv_heads % workers and workers % facts.kv_heads):
            yield (
                f"{key}.tensor_parallel_size is {workers}, which does not divide the {facts.heads} heads and "
                f"{facts.kv_heads} key heads of {agent.model}: set it to a number that does"
            )
        if agent.trained and mini_batch < node.devices:
            yield (
                f"algorithm.mini_batch_size is {mini_batch} for the {node.devices} ranks of {agent.agent_id}, of which "
                f"some would never train: raise it to a multiple of {node.devices}, or lower {key}.devices"
            )


def _rank_notes(cfg: DictConfig) -> Iterator[str]:
    mini_batch = cfg.algorithm.mini_batch_size
    for agent_id in roles_of(cfg.agents):
        agent = cfg.agents[agent_id]
        if agent.trained and mini_batch >= agent.devices and mini_batch % agent.devices:
            yield (
                f"agents.{agent_id}.devices={agent.devices} does not divide algorithm.mini_batch_size={mini_batch}: "
                "ranks wait for one another in every mini-batch"
            )


def _store_notes(cfg: DictConfig, agents: Sequence[AgentPlan]) -> Iterator[str]:
    """The weights that are served are kept for engines that have to be started again, while new ones arrive."""
    versions = 2 + cfg.runtime.max_staleness
    stored = cfg.engine.weight_transport == "object_store"
    needed = versions * sum(a.sync_bytes for a in agents if stored or cfg.agents[a.agent_id].model.lora is not None)
    store = _object_store(cfg)
    room = math.ceil(needed / GIB)
    if store < needed and cfg.runtime.name == "ray" and cfg.runtime.address is None:
        yield (
            f"{versions} versions of all agents' weights take {needed / GIB:.1f} GiB, of which Ray keeps on disk what "
            f"its object store of {store / GIB:.1f} does not hold: set runtime.object_store_gb={room}"
        )


def _coach_notes(batches: RunBatches) -> Iterator[str]:
    if batches.judged_in_evaluations is None:
        yield (
            "datamodule.val_scored=true and datamodule.val_limit is null: the coach's calls leave out the "
            f"{batches.evaluations} evaluations, each of the whole selection split"
        )


def _cache_problems(cfg: DictConfig, caches: Sequence[KVCache]) -> Iterator[str]:
    for cache in caches:
        if cache.tokens >= cache.longest_context:
            continue
        name, context = ", ".join(cache.group), cache.longest_context
        room = f"the KV cache of {name} has room for {cache.tokens} tokens and one sequence may have {context}"
        if cfg.trainer.accelerator == "cpu":
            needed = math.ceil(100 * context * cache.bytes_per_token / GIB) / 100
            yield f"{room}: set engine.kv_cache_gb to {needed:.2f} or more, or model.context_length lower"
        else:
            yield (
                f"{room}: raise engine.gpu_memory_utilization or tensor_parallel_size, or lower model.context_length"
            )


def _memory_problems(cfg: DictConfig, devices: Sequence[Device]) -> Iterator[str]:
    """One sentence for all GPUs that are too small for the same part, and one per node."""
    seen = set()
    for device in devices:
        if device.fits:
            continue
        largest = device.largest
        agent_id = largest.owner.partition(",")[0]
        on_gpu = "GPU" in device.name
        if (on_gpu, agent_id, largest.part) in seen:
            continue
        seen.add((on_gpu, agent_id, largest.part))
        advice = _gpu_advice(cfg, agent_id, largest.part) if on_gpu else _host_advice(cfg)
        yield (
            f"{device.name} needs {device.peak / GIB:.1f} GiB and has {device.capacity / GIB:.1f}, the largest part "
            f"is {largest.part} of {largest.owner} with {largest.bytes / GIB:.1f}: {advice}"
        )


def _gpu_advice(cfg: DictConfig, agent_id: str, part: str) -> str:
    if part in ("KV cache", "engine weights", "engine workspace"):
        return "lower engine.gpu_memory_utilization, or raise tensor_parallel_size"
    if part in ("activations", "logits chunk"):
        ways = (
            ["set model.gradient_checkpointing=true"] if not cfg.agents[agent_id].model.gradient_checkpointing else []
        )
        return ", ".join([*ways, "lower algorithm.micro_batch_size, logprob_chunk_size or model.context_length"])
    node = cfg.agents[agent_id]
    ways = [] if node.strategy == "zero3_offload" else ["set strategy=zero3_offload"]
    sharded = "" if node.strategy.startswith("zero3") else " with strategy=zero3"
    ways.append(f"raise agents.{agent_id}.devices{sharded}")
    return ", or ".join([*ways, *(["train adapters (model.lora)"] if node.model.lora is None else [])])


def _host_advice(cfg: DictConfig) -> str:
    offloads = any(agent.trained and agent.strategy == "zero3_offload" for agent in cfg.agents.values())
    if offloads:
        return "use strategy=zero3, train adapters (model.lora), or take nodes with more memory"
    return "train adapters (model.lora), take a smaller model, shorter sequences or model.gradient_checkpointing=true"
