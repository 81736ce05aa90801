"""The config that a run has written, as it is read now."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

_LLM_COACH = "lightning_mappa.coaches.llm.LLMCoach"
_FORMER_KEYS = ("max_missing_rate", "missing_window")
"""Of an LLM coach; they are for the whole coach now, whatever it is made of."""


def saved_config(path: Path) -> DictConfig:
    """What a run has written, without keys that the coaches in its coach took once and take no more."""
    loaded = OmegaConf.load(path)
    assert isinstance(loaded, DictConfig)
    coach = loaded.get("coach")
    _drop_former_keys(list(coach.values()) if isinstance(coach, DictConfig) else [])
    return loaded


def _drop_former_keys(nodes: Iterable[Any]) -> None:
    for node in nodes:
        if isinstance(node, DictConfig):
            if node.get("_target_") == _LLM_COACH:
                for key in _FORMER_KEYS:
                    node.pop(key, None)
            _drop_former_keys(node.values())
        elif isinstance(node, ListConfig):
            _drop_former_keys(node)
