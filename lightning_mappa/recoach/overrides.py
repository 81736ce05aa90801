"""What `mappa recoach` reads of a config, and what an override of anything else would only seem to change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lightning_mappa.audit.digest import judging
from lightning_mappa.errors import ConfigError
from lightning_mappa.fit import CREDIT_KEYS

REWARD_KEYS = ("reward", "process_weight", "outcome_weight", "truncated")
UPDATE_KEYS = ("policy_loss", "loss_agg_mode", "rollout_correction", "mini_batch_size")
CLIP_KEYS = ("clip_ratio_low", "clip_ratio_high", "dual_clip")
"""Of an update that keeps its weights: only dropout moves its ratios away from 1."""
MEMORY_KEYS = ("micro_batch_size", "micro_batch_tokens", "logprob_chunk_size")
"""How the update is computed, on both sides alike; what comes of it does not depend on them."""
NEVER = {"max_skipped_steps": "no step is taken"}
"""Key of `algorithm` → why it changes nothing."""

_READ = ("coach", "algorithm", "recoach", "run", "runtime.num_threads", "runtime.deadline_s", "trainer.accelerator")


def changed(recorded: DictConfig, cfg: DictConfig) -> dict[str, list[Any]]:
    """Key of `algorithm` → what the run has and what is asked for, for those that verdicts or updates depend on.

    Raises `ConfigError` for an override that changes nothing here, inside or outside of `algorithm`.
    """
    for key, value in _differences(_plain(recorded), _plain(cfg)):
        if not key.startswith(tuple(f"{name}." for name in _READ)) and key not in _READ:
            raise _ineffective(key, value, "recorded episodes are not played again")
    before, after = _plain(recorded.algorithm), _plain(cfg.algorithm)
    found = {
        key: [before[key], after[key]] for key in sorted(after) if before[key] != after[key] and key not in MEMORY_KEYS
    }
    for key, (_, value) in found.items():
        reason = _no_effect(key, cfg)
        if reason is not None:
            raise _ineffective(f"algorithm.{key}", value, reason)
    return found


def differs(recorded: DictConfig, cfg: DictConfig) -> bool:
    """Whether the coach of `cfg` may judge otherwise than that of the run."""
    return judging(cfg.coach) != judging(recorded.coach)


def side_of(recorded: DictConfig, cfg: DictConfig) -> DictConfig:
    """`cfg` with the run's own algorithm, computed as `cfg` says."""
    memory = {key: cfg.algorithm[key] for key in MEMORY_KEYS}
    merged = OmegaConf.merge(cfg, {"algorithm": _plain(recorded.algorithm) | memory})
    assert isinstance(merged, DictConfig)
    return merged


def deciding(cfg: DictConfig) -> list[Any]:
    """What a report depends on beside the run: the coach and the algorithm, without what only costs or computes."""
    algorithm = _plain(cfg.algorithm)
    return [judging(cfg.coach), {key: value for key, value in algorithm.items() if key not in MEMORY_KEYS}]


def _no_effect(key: str, cfg: DictConfig) -> str | None:
    if key in NEVER:
        return NEVER[key]
    if key in (*UPDATE_KEYS, *CLIP_KEYS) and cfg.recoach.update_steps == 0:
        return "it is of the update, and recoach.update_steps is 0"
    if key in CLIP_KEYS and not _has_dropout(cfg):
        return "weights are kept, so that every ratio is 1 and none is clipped"
    assert key in (*CREDIT_KEYS, *REWARD_KEYS, *UPDATE_KEYS, *CLIP_KEYS), key
    return None


def _has_dropout(cfg: DictConfig) -> bool:
    models = [agent.model for agent in cfg.agents.values() if agent.trained]
    return any(model.lora is not None and model.lora.dropout > 0 for model in models)


def _ineffective(key: str, value: Any, reason: str) -> ConfigError:
    return ConfigError(
        f"{key}={'null' if value is None else value} changes nothing in mappa recoach ({reason}); "
        "allowed: coach, recoach.KEY, and algorithm.KEY of rewards, credit and loss"
    )


def _differences(before: Any, after: Any, key: str = "") -> list[tuple[str, Any]]:
    """Dotted key and new value of all that is not the same."""
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        return [
            entry
            for name in sorted(before.keys() | after.keys())
            for entry in _differences(before.get(name), after.get(name), f"{key}.{name}" if key else str(name))
        ]
    return [] if before == after else [(key, after)]


def _plain(node: DictConfig) -> dict[str, Any]:
    plain: Any = OmegaConf.to_container(node, resolve=True)
    return dict(plain)
