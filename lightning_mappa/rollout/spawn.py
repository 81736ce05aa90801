"""Where the actors of engines are placed, when nobody else says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray
import torch

from lightning_mappa.rollout.engine_group import EngineGroup, server_environment
from lightning_mappa.rollout.vllm_server import VLLMServer

Spawn = Callable[[EngineGroup, int, int], Any]
"""Makes the actor of one replica (its number) at a policy version; returns its handle without waiting for it."""


def spawn_anywhere(group: EngineGroup, replica: int, policy_version: int) -> Any:
    """Lets Ray place the actor: `num_threads` cores, and on CUDA `tensor_parallel_size` GPUs."""
    return (
        ray.remote(VLLMServer)
        .options(
            num_cpus=group.num_threads,
            num_gpus=group.tensor_parallel_size if torch.cuda.is_available() else 0,
            max_restarts=0,  # a fresh engine has the weights of version 0: it is started again here
            max_concurrency=8192,
            runtime_env={"env_vars": server_environment(group)},
        )
        .remote(group, replica, policy_version)
    )
