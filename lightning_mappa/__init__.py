"""Fine-tune multi-agent LLM systems with per-action coach rewards on PyTorch Lightning (MAPPA).

The public names are imported when they are first used, so that `import lightning_mappa` stays light.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_mappa.callbacks.checkpoint_selection import CheckpointSelection
    from lightning_mappa.callbacks.kl_penalty import KLPenalty
    from lightning_mappa.callbacks.weight_sync import WeightSync
    from lightning_mappa.coaches.base import Coach
    from lightning_mappa.datamodules.rollout import RolloutDataModule
    from lightning_mappa.module import AgentModule
    from lightning_mappa.rollout.engine import Engine
    from lightning_mappa.tasks.base import TaskSource
    from lightning_mappa.tools.base import Tool
    from lightning_mappa.types import Action, Episode, Experience, ScoredEpisode, Task, Verdict
    from lightning_mappa.workflows.base import Workflow

__all__ = [
    "Action",
    "AgentModule",
    "CheckpointSelection",
    "Coach",
    "Engine",
    "Episode",
    "Experience",
    "KLPenalty",
    "RolloutDataModule",
    "ScoredEpisode",
    "Task",
    "TaskSource",
    "Tool",
    "Verdict",
    "WeightSync",
    "Workflow",
]

_HOME = {
    "AgentModule": "module",
    "CheckpointSelection": "callbacks.checkpoint_selection",
    "Coach": "coaches.base",
    "Engine": "rollout.engine",
    "KLPenalty": "callbacks.kl_penalty",
    "RolloutDataModule": "datamodules.rollout",
    "TaskSource": "tasks.base",
    "Tool": "tools.base",
    "WeightSync": "callbacks.weight_sync",
    "Workflow": "workflows.base",
}
"""The module of a public name below `lightning_mappa`; what is not listed lives in `types`."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'lightning_mappa' has no attribute {name!r}")
    return getattr(import_module(f"lightning_mappa.{_HOME.get(name, 'types')}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
