"""The machines that are planned for."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from omegaconf import DictConfig

from lightning_mappa.errors import ConfigError
from lightning_mappa.plan.memory import GIB
from lightning_mappa.runtime.placement import Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    cluster: Cluster
    gpu_memory: int
    """Bytes of one GPU; 0 without any."""
    node_memory: int
    """Bytes of host memory of one node."""


def hardware_of(cfg: DictConfig) -> Hardware:
    """What `plan` says, and this machine where that is null. On the CPU accelerator there are no GPUs.

    Raises:
        ConfigError: a GPU is asked for and none is there, or a number of GPUs comes without their memory.
    """
    plan = cfg.plan
    node_memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if plan.node_memory_gb is not None:
        node_memory = int(plan.node_memory_gb * GIB)
    if cfg.trainer.accelerator == "cpu":
        return Hardware(cluster=Cluster(nodes=plan.nodes), gpu_memory=0, node_memory=node_memory)
    gpus = torch.cuda.device_count() if plan.gpus_per_node is None else plan.gpus_per_node
    if gpus == 0:
        raise ConfigError(
            "trainer.accelerator is cuda and there is no GPU to plan for: set plan.gpus_per_node and "
            "plan.gpu_memory_gb, or trainer.accelerator=cpu"
        )
    if plan.gpu_memory_gb is not None:
        gpu_memory = int(plan.gpu_memory_gb * GIB)
    elif torch.cuda.is_available():
        gpu_memory = torch.cuda.get_device_properties(0).total_memory
    else:
        raise ConfigError(f"plan.gpus_per_node is {gpus} and this machine has none to ask: set plan.gpu_memory_gb")
    cluster = Cluster(nodes=plan.nodes, gpus_per_node=gpus)
    return Hardware(cluster=cluster, gpu_memory=gpu_memory, node_memory=node_memory)
