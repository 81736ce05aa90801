"""Everything that can be wrong with a config beyond the type of a value, each rule with one sentence.

Single keys: `bounds`; agents: `agent_checks`; engines, ranks and the runtime: `scale_checks`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lightning_mappa.agent_checks import check_agents
from lightning_mappa.algorithm.choices import check_choice
from lightning_mappa.bounds import ABOVE, AT_LEAST, CHOICES, check_bound
from lightning_mappa.build import check_target
from lightning_mappa.errors import ConfigError
from lightning_mappa.scale_checks import check_scale
from lightning_mappa.shared_weights import roles_of

GROUPS = ("tools", "callbacks", "logger")
"""Mappings whose every entry is a node with a `_target_`."""

WEIGHT_SYNC = "lightning_mappa.callbacks.weight_sync.WeightSync"


def check(cfg: DictConfig) -> None:
    """Raises `ConfigError`, or `NotAvailableError` for an option that comes later; changes nothing on disk.

    `cfg` has been through `config.structured`.
    """
    _check_bounds(cfg)
    for key, (allowed, later) in CHOICES.items():
        check_choice(key, OmegaConf.select(cfg, key), allowed, later=later)
    _check_optimizer(cfg)
    _check_algorithm(cfg)
    check_agents(cfg)
    check_scale(cfg)
    _check_targets(cfg)
    _check_weight_sync(cfg)


def check_folders(cfg: DictConfig) -> None:
    """What `resume` names is there, and the run folder can be made and holds nothing yet."""
    if cfg.resume is not None:
        if not (Path(cfg.resume) / "config.yaml").is_file():
            raise ConfigError(f"resume={cfg.resume} is no run folder: it holds no config.yaml")
        if (Path(cfg.resume) / "test.json").exists():
            raise ConfigError(
                f"resume={cfg.resume}: its report split has been read (test.json), and training on would make "
                "those figures another system's; start a new run"
            )
        return
    if cfg.output_dir is None:
        return
    folder = Path(cfg.output_dir)
    if folder.is_dir() and any(folder.iterdir()):
        raise ConfigError(
            f"output_dir={folder} is not empty: name a new folder, or go on with that run by resume={folder}"
        )
    there = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    try:
        # Rights alone do not tell (root, read-only file systems): only writing does.
        tempfile.TemporaryFile(dir=there).close()
    except OSError as error:
        raise ConfigError(f"output_dir={folder} cannot be written: {error.strerror} at {there}") from error


def target_nodes(cfg: DictConfig) -> Iterator[tuple[str, dict[Any, Any]]]:
    """Every node with a `_target_`, those inside others too, with the key where it stands."""
    yield from _target_nodes(OmegaConf.to_container(cfg, resolve=True), "")


def _target_nodes(node: Any, key: str) -> Iterator[tuple[str, dict[Any, Any]]]:
    if isinstance(node, dict):
        if "_target_" in node:
            yield key, node
        for name, inner in node.items():
            yield from _target_nodes(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(node, list):
        for index, inner in enumerate(node):
            yield from _target_nodes(inner, f"{key}[{index}]")


def _check_bounds(cfg: DictConfig) -> None:
    for key, bound in AT_LEAST.items():
        check_bound(key, OmegaConf.select(cfg, key), at_least=bound)
    for key, bound in ABOVE.items():
        check_bound(key, OmegaConf.select(cfg, key), above=bound)


def _check_optimizer(cfg: DictConfig) -> None:
    betas = list(cfg.optimizer.betas)
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ConfigError(f"optimizer.betas is {betas}; allowed: two numbers from 0 to below 1")
    for name in ("warmup_ratio", "min_lr_ratio"):
        if not 0 <= cfg.optimizer[name] <= 1:
            raise ConfigError(f"optimizer.{name} is {cfg.optimizer[name]}; allowed: 0 to 1")


def _check_algorithm(cfg: DictConfig) -> None:
    algorithm, datamodule = cfg.algorithm, cfg.datamodule
    if algorithm.clip_ratio_low >= 1:
        raise ConfigError(f"algorithm.clip_ratio_low is {algorithm.clip_ratio_low}; allowed: below 1")
    weights = (algorithm.process_weight, algorithm.outcome_weight)
    if algorithm.reward == "mix" and weights == (0, 0):
        raise ConfigError("algorithm.process_weight and algorithm.outcome_weight are both 0 with reward=mix")
    if algorithm.reward != "mix" and weights != (1, 0):
        raise ConfigError(
            f"algorithm.process_weight and outcome_weight are {weights}, but algorithm.reward="
            f"{algorithm.reward} does not read them; allowed: (1, 0), or reward=mix"
        )
    episodes = datamodule.rollout_batch_size * datamodule.n_samples_per_prompt
    if episodes < algorithm.mini_batch_size:
        raise ConfigError(
            f"datamodule.rollout_batch_size x datamodule.n_samples_per_prompt is {episodes}, less than "
            f"algorithm.mini_batch_size={algorithm.mini_batch_size}: raise the first or lower the last"
        )


def _check_targets(cfg: DictConfig) -> None:
    whole = {key: cfg[key] for key in ("workflow", "task", "coach")}
    entries = {f"{group}.{name}": node for group in GROUPS for name, node in cfg[group].items()}
    for key, node in (whole | entries).items():
        if not isinstance(node, DictConfig) or "_target_" not in node:
            raise ConfigError(f"{key} has no _target_: give the import path of a class")
    for key, plain in target_nodes(cfg):
        check_target(plain, key)


def _check_weight_sync(cfg: DictConfig) -> None:
    from lightning_mappa.callbacks.weight_sync import WeightSync

    for name, node in cfg.callbacks.items():
        target = check_target(node, f"callbacks.{name}")
        if isinstance(target, type) and issubclass(target, WeightSync):
            return
    trained = ", ".join(agent_id for agent_id in roles_of(cfg.agents) if cfg.agents[agent_id].trained)
    raise ConfigError(
        f"callbacks has no WeightSync, so the engine would go on sampling {trained} with old weights: "
        f"add +callbacks.weight_sync._target_={WEIGHT_SYNC}"
    )
