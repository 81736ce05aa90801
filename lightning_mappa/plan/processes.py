"""The processes of a run, where each is, and what it holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from omegaconf import DictConfig

from lightning_mappa.plan.agents import AgentPlan
from lightning_mappa.plan.hardware import Hardware
from lightning_mappa.plan.memory import (
    CUDA_CONTEXT,
    DTYPE_BYTES,
    ENGINE_WORKSPACE,
    GIB,
    PROCESS_HOST,
    Part,
    engine_weights,
    kv_bytes_per_token,
    trainer_parts,
)
from lightning_mappa.runtime.placement import EnginePlacement, Placement, agent_needs, lay_out, place

CPU_KV_GB = 1.0
"""What engine.kv_cache_gb=null means on the CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A rank or a worker of an engine. With runtime=local all of them are one process of the system."""

    owner: str
    node: int
    gpu: int | None
    """None: it computes on the CPU."""
    share: float
    """Of that GPU."""
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCache:
    """Of one engine, in tokens of all its workers together."""

    group: tuple[str, ...]
    bytes: int
    """On one worker; may be negative where weights alone are too large."""
    bytes_per_token: int
    longest_context: int

    @property
    def tokens(self) -> int:
        return max(0, self.bytes // self.bytes_per_token)


def plan_processes(
    cfg: DictConfig, agents: Sequence[AgentPlan], hardware: Hardware
) -> tuple[list[Process], list[KVCache]]:
    """Raises `ConfigError` for what cannot be placed."""
    by_id = {agent.agent_id: agent for agent in agents}
    if cfg.runtime.name == "local":
        return _in_one_process(cfg, agents)
    one_engine = cfg.engine.name == "transformers"
    placement = place(agent_needs(cfg), hardware.cluster, colocate=cfg.runtime.colocate, one_engine=one_engine)
    places = lay_out(placement, hardware.cluster)
    caches: list[KVCache] = []
    processes = list(_ranks(placement, by_id, places))
    for engine in placement.engines:
        served = [by_id[agent_id] for agent_id in engine.group]
        if one_engine:
            parts = (*_transformers_parts(cfg, served), Part(name="process", host=PROCESS_HOST))
        else:
            asleep = cfg.runtime.colocate and any(agent.trained for agent in served)
            cache = _kv_cache(cfg, engine, served, hardware)
            parts = _vllm_parts(cfg, engine, served, cache, asleep=asleep)
            if engine.replica == 0:
                caches.append(cache)
        for worker, bundle in enumerate(engine.bundles):
            node, gpu = places.get(bundle.slot, (0, None))
            name = f"engine {engine.replica} of {', '.join(engine.group)}"
            owner = f"{name}, worker {worker}" if len(engine.bundles) > 1 else name
            processes.append(Process(owner=owner, node=node, gpu=gpu, share=bundle.gpus, parts=parts))
    return processes, caches


def _ranks(
    placement: Placement, agents: Mapping[str, AgentPlan], places: Mapping[int, tuple[int, int]]
) -> Iterator[Process]:
    for agent in placement.agents:
        shape = agents[agent.agent_id].shape
        assert shape is not None
        for rank, bundle in enumerate(agent.ranks):
            node, gpu = places.get(bundle.slot, (0, None))
            owner = f"{agent.agent_id}, rank {rank}"
            yield Process(owner=owner, node=node, gpu=gpu, share=bundle.gpus, parts=trainer_parts(shape))


def _in_one_process(cfg: DictConfig, agents: Sequence[AgentPlan]) -> tuple[list[Process], list[KVCache]]:
    on_gpu = cfg.trainer.accelerator == "cuda"
    processes = []
    for agent in agents:
        if agent.shape is not None:
            parts = tuple(part for part in trainer_parts(agent.shape) if part.name != "process")
            gpu = 0 if on_gpu else None
            processes.append(Process(owner=f"{agent.agent_id}, trainer", node=0, gpu=gpu, share=1.0, parts=parts))
    engine = (*_transformers_parts(cfg, agents), Part(name="process", host=PROCESS_HOST))
    processes.append(Process(owner="engine of all agents", node=0, gpu=None, share=0.0, parts=engine))
    return processes, []


def _transformers_parts(cfg: DictConfig, agents: Sequence[AgentPlan]) -> tuple[Part, ...]:
    """A base per group of agents, adapters, and the keys and values of the batch that is being decoded."""
    bases: dict[tuple[str, ...], AgentPlan] = {}
    for agent in agents:
        adapted = agent.trained and agent.lora_parameters
        kind = "adapters" if adapted else "trained" if agent.trained else "frozen"
        bases.setdefault((kind, agent.agent_id if kind == "trained" else agent.model), agent)
    dtypes = {agent.agent_id: cfg.agents[agent.agent_id].model.dtype for agent in agents}
    episodes = cfg.datamodule.rollout_batch_size * cfg.datamodule.n_samples_per_prompt
    rows = min(cfg.engine.max_batch_size, episodes, cfg.datamodule.max_episodes_in_flight)
    return (
        Part(name="weights", device=sum(engine_weights(one.facts, dtypes[one.agent_id]) for one in bases.values())),
        Part(name="adapters", device=sum(_adapter_bytes(one, dtypes[one.agent_id]) for one in agents if one.trained)),
        Part(
            name="KV cache",
            device=max(rows * one.longest * kv_bytes_per_token(one.facts, dtypes[one.agent_id]) for one in agents),
            when="rollout",
        ),
    )


def _kv_cache(cfg: DictConfig, engine: EnginePlacement, served: Sequence[AgentPlan], hardware: Hardware) -> KVCache:
    """On a GPU what vLLM's share of it leaves, on the CPU what is set aside."""
    first, workers = served[0], len(engine.bundles)
    dtype = cfg.agents[first.agent_id].model.dtype
    if hardware.cluster.gpus:
        share = int(cfg.engine.gpu_memory_utilization * hardware.gpu_memory)
        size = share - engine_weights(first.facts, dtype, workers) - _adapter_slots(served, dtype) - ENGINE_WORKSPACE
    else:
        size = int((cfg.engine.kv_cache_gb or CPU_KV_GB) * GIB)
    return KVCache(
        group=engine.group,
        bytes=size,
        bytes_per_token=kv_bytes_per_token(first.facts, dtype, workers),
        longest_context=max(agent.context_length for agent in served),
    )


def _vllm_parts(
    cfg: DictConfig, engine: EnginePlacement, served: Sequence[AgentPlan], cache: KVCache, *, asleep: bool
) -> tuple[Part, ...]:
    """Of one worker. Asleep during updates, it keeps its weights in host memory and has no cache."""
    first = served[0]
    dtype = cfg.agents[first.agent_id].model.dtype
    on_gpu = engine.bundles[0].gpus > 0
    weights = engine_weights(first.facts, dtype, len(engine.bundles))
    parts = [
        Part(name="engine weights", device=weights),
        Part(name="adapters", device=_adapter_slots(served, dtype)),
        Part(name="KV cache", device=max(0, cache.bytes)),
        Part(name="engine workspace", device=ENGINE_WORKSPACE if on_gpu else 0),
    ]
    if asleep:
        parts = [replace(part, when="rollout") for part in parts]
        parts.append(Part(name="engine weights, asleep", host=weights))
    context = [Part(name="CUDA context", device=CUDA_CONTEXT)] if on_gpu else []
    return tuple(
        part for part in (*parts, *context, Part(name="process", host=PROCESS_HOST)) if part.device or part.host
    )


def _adapter_slots(served: Sequence[AgentPlan], dtype: str) -> int:
    """One more than there are adapters, for requests without one, each as large as the largest."""
    sizes = [_adapter_bytes(agent, dtype) for agent in served if agent.trained and agent.lora_parameters]
    return (len(sizes) + 1) * max(sizes) if sizes else 0


def _adapter_bytes(agent: AgentPlan, dtype: str) -> int:
    return agent.lora_parameters * DTYPE_BYTES[dtype]
