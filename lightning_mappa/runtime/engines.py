"""The engine that a config names, in actors of a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import ray
from omegaconf import DictConfig, OmegaConf

from lightning_mappa.agents import AgentFacts
from lightning_mappa.models.load import resolve_path
from lightning_mappa.rollout.engine import Engine
from lightning_mappa.rollout.engine_group import AdapterSpec, EngineGroup, ServedAgent, server_environment
from lightning_mappa.runtime.placement import Placement, agent_needs, engine_groups
from lightning_mappa.runtime.ray_cluster import RayCluster
from lightning_mappa.runtime.remote_engine import RemoteTransformersEngine, TransformersWorker
from lightning_mappa.system import torch_threads

REQUESTS = 8192
"""Most that one vLLM engine's actor takes at a time; it queues them itself."""


class RemoteEngine(Engine, Protocol):
    """An engine in other processes."""

    @property
    def sync_bytes(self) -> Mapping[str, int]:
        """Of the last weight sync, by agent."""
        ...

    def peak_rss_gib(self) -> Mapping[str, float | None]:
        """The most memory that each of its processes has held, by name."""
        ...


def start_engine(
    cfg: DictConfig, facts: Mapping[str, AgentFacts], placement: Placement, cluster: RayCluster
) -> RemoteEngine:
    """Returns when every engine has loaded its weights."""
    if cfg.engine.name == "transformers":
        return _transformers(cfg, placement, cluster)
    return _vllm(cfg, facts, placement, cluster)


def _transformers(cfg: DictConfig, placement: Placement, cluster: RayCluster) -> RemoteTransformersEngine:
    env = {"OMP_NUM_THREADS": str(torch_threads(cfg)), "GOMP_SPINCOUNT": "1000"}
    worker = ray.remote(TransformersWorker)
    config = OmegaConf.to_yaml(cfg, resolve=True)
    options = {**cluster.options(placement.engines[0].bundles, env), "max_concurrency": len(cfg.agents) + 2}
    return RemoteTransformersEngine(
        lambda: worker.options(**options).remote(config),
        deadline_s=cfg.runtime.deadline_s,
        heartbeat_s=cfg.runtime.heartbeat_s,
        max_restarts=cfg.runtime.max_restarts,
    )


def _vllm(cfg: DictConfig, facts: Mapping[str, AgentFacts], placement: Placement, cluster: RayCluster) -> Any:
    from lightning_mappa.rollout.vllm_engine import VLLMEngine
    from lightning_mappa.rollout.vllm_server import VLLMServer

    bundles = {(engine.group, engine.replica): engine.bundles for engine in placement.engines}
    server = ray.remote(VLLMServer)

    def spawn(group: EngineGroup, replica: int, policy_version: int) -> Any:
        options = cluster.options(bundles[tuple(group.agents), replica], server_environment(group))
        return server.options(**options, max_concurrency=REQUESTS).remote(group, replica, policy_version)

    return VLLMEngine(
        [served_group(cfg, facts, group) for group in engine_groups(agent_needs(cfg))],
        spawn=spawn,
        deadline_s=cfg.runtime.deadline_s,
        heartbeat_s=cfg.runtime.heartbeat_s,
        max_restarts=cfg.runtime.max_restarts,
    )


def served_group(cfg: DictConfig, facts: Mapping[str, AgentFacts], agent_ids: tuple[str, ...]) -> EngineGroup:
    """The engine that serves `agent_ids`, which `engine_groups` has put together."""
    engine, first = cfg.engine, cfg.agents[agent_ids[0]]
    return EngineGroup(
        model_path=str(resolve_path(first.model.path)),
        dtype=first.model.dtype,
        agents={agent_id: _served(cfg, facts[agent_id]) for agent_id in agent_ids},
        num_engines=first.num_engines,
        tensor_parallel_size=first.tensor_parallel_size,
        max_batch_size=engine.max_batch_size,
        kv_cache_gb=engine.kv_cache_gb,
        gpu_memory_utilization=engine.gpu_memory_utilization,
        enforce_eager=engine.enforce_eager,
        enable_prefix_caching=engine.enable_prefix_caching,
        weight_transport=engine.weight_transport,
        sleeps=cfg.runtime.colocate,
    )


def _served(cfg: DictConfig, facts: AgentFacts) -> ServedAgent:
    lora = cfg.agents[facts.agent_id].model.lora
    adapter = None
    if lora is not None and facts.trained:
        targets = lora.target_modules
        adapter = AdapterSpec(
            r=lora.r, alpha=lora.alpha, target_modules=targets if isinstance(targets, str) else tuple(targets)
        )
    return ServedAgent(
        eos_token_ids=facts.eos_token_ids,
        context_length=facts.context_length,
        trained=facts.trained,
        adapter=adapter,
    )
