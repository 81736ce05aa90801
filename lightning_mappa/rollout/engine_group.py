"""Which agents are served by one model, by how many engines, and with what settings."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lightning_mappa.errors import ConfigError, InfrastructureError
from lightning_mappa.rollout.engine import GenerationRequest

DTYPES = ("float32", "bfloat16")
TEMPERATURES = (0.01, 2.0)
"""vLLM raises what is lower to this without a word that reaches the caller, and refuses what is higher."""
TRANSPORTS = ("object_store", "nccl", "ipc")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSpec:
    """A LoRA adapter, as `model.lora` describes it."""

    r: int
    alpha: int
    target_modules: tuple[str, ...] | str


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedAgent:
    eos_token_ids: frozenset[int]
    """Every id that ends a turn."""
    context_length: int
    """Most tokens that prompt and response may have together."""
    trained: bool
    adapter: AdapterSpec | None = None
    """None: all weights are the agent's own when it is trained, and the base model's when it is not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineGroup:
    """Agents that one base model serves: adapters and frozen agents together, a fully trained agent alone.

    Every engine of the group (a replica) serves all of its agents.
    """

    model_path: str
    """A folder that every node sees, or a Hugging Face id."""
    dtype: str
    agents: Mapping[str, ServedAgent]
    num_engines: int = 1
    tensor_parallel_size: int = 1
    """GPUs of one engine."""
    max_batch_size: int = 128
    kv_cache_gb: float | None = None
    """On CPU: GiB of KV cache per engine; None is 1."""
    gpu_memory_utilization: float = 0.85
    """On CUDA: share of a GPU's memory that one engine may take."""
    enforce_eager: bool | None = None
    """None compiles on CUDA and not on CPU, where compiling takes longer than a short run gains."""
    enable_prefix_caching: bool = True
    weight_transport: str = "object_store"
    sleeps: bool = False
    """On CUDA: frees its memory between `sleep` and `wake`, for engines that share a GPU with a Trainer."""
    num_threads: int = 1
    """OpenMP threads of one engine on CPU. One is fastest beside one busy process on two cores."""

    def __post_init__(self) -> None:
        if not self.agents:
            raise ConfigError("engine: a group of engines needs at least one agent")
        if self.dtype not in DTYPES:
            raise ConfigError(f"model.dtype: got {self.dtype!r}, engine=vllm serves {', '.join(DTYPES)}")
        if self.weight_transport not in TRANSPORTS:
            raise ConfigError(
                f"engine.weight_transport: got {self.weight_transport!r}, allowed are {', '.join(TRANSPORTS)}"
            )
        for key in ("num_engines", "tensor_parallel_size", "max_batch_size", "num_threads"):
            if getattr(self, key) < 1:
                raise ConfigError(f"engine.{key}: got {getattr(self, key)}, allowed is 1 or more")
        alone = [agent_id for agent_id, one in self.agents.items() if one.trained and one.adapter is None]
        if alone and len(self.agents) > 1:
            raise ConfigError(
                f"agents.{alone[0]}: a fully trained agent needs an engine of its own, not one with "
                f"{', '.join(agent_id for agent_id in self.agents if agent_id != alone[0])}"
            )

    @property
    def name(self) -> str:
        return "+".join(self.agents)

    @property
    def adapters(self) -> dict[str, AdapterSpec]:
        return {agent_id: one.adapter for agent_id, one in self.agents.items() if one.adapter is not None}

    @property
    def context_length(self) -> int:
        return max(one.context_length for one in self.agents.values())

    def agent(self, agent_id: str) -> ServedAgent:
        if agent_id not in self.agents:
            raise InfrastructureError(f"agent {agent_id!r} is not served; served are {sorted(self.agents)}")
        return self.agents[agent_id]

    def check(self, request: GenerationRequest) -> None:
        """Raises `InfrastructureError` for a request that cannot be served."""
        limit = self.agent(request.agent_id).context_length
        length, new = len(request.prompt_ids), request.sampling.max_new_tokens
        if length < 1 or new < 1 or length + new > limit:
            raise InfrastructureError(
                f"{request.agent_id!r}: {length} prompt tokens and {new} new ones do not fit: "
                f"at least one of each and at most {limit} together"
            )
        lowest, highest = TEMPERATURES
        temperature = request.sampling.temperature
        if temperature != 0 and not lowest <= temperature <= highest:
            raise InfrastructureError(
                f"{request.agent_id!r}: temperature is {temperature:g}, "
                f"engine=vllm samples at 0 or {lowest} to {highest:g}"
            )
        if request.sampling.top_p != 1:
            raise InfrastructureError(
                f"{request.agent_id!r}: top_p is {request.sampling.top_p:g}; engine=vllm samples at 1: its log-probs "
                "would be of what top_p leaves, and not those that training compares them with"
            )


def server_environment(group: EngineGroup) -> dict[str, str]:
    """What an engine's process has to start with: OpenMP and Ray read it before any Python of ours runs."""
    environment = {
        "OMP_NUM_THREADS": str(group.num_threads),
        # The default spin-wait of libgomp takes the core from whoever else wants it: a third of the speed at best.
        "GOMP_SPINCOUNT": "1000",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
        "TOKENIZERS_PARALLELISM": "false",
    }
    if Path(group.model_path).is_dir():
        environment["HF_HUB_OFFLINE"] = "1"
    return environment
