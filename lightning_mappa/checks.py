"""Everything that can be wrong with a config beyond the type of a value, each rule with one sentence."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lightning_mappa.algorithm.choices import ALGORITHM_OPTIONS, check_choice
from lightning_mappa.build import check_target
from lightning_mappa.errors import ConfigError, NotAvailableError

CHOICES: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    **ALGORITHM_OPTIONS,
    "engine.name": (("transformers",), ("vllm",)),
    "runtime.name": (("local",), ("ray",)),
    "strategy": (("single_device",), ("ddp", "fsdp", "zero1", "zero2", "zero3", "zero3_offload")),
    "trainer.accelerator": (("cpu",), ("auto", "cuda", "gpu", "mps", "tpu")),
}
"""Option -> (allowed values, documented values that this version does not build)."""

DTYPES = ("float32", "bfloat16", "float64")

AT_LEAST: Mapping[str, float] = {
    "seed": 0,
    "n_cases": 28,  # two of every audit template
    "optimizer.lr": 0,
    "optimizer.weight_decay": 0,
    "algorithm.process_weight": 0,
    "algorithm.outcome_weight": 0,
    "algorithm.mini_batch_size": 1,
    "algorithm.micro_batch_size": 1,
    "algorithm.logprob_chunk_size": 1,
    "algorithm.max_skipped_steps": 1,
    "datamodule.rollout_batch_size": 1,
    "datamodule.n_samples_per_prompt": 1,
    "datamodule.max_episodes_in_flight": 1,
    "datamodule.val_n_samples": 1,
    "datamodule.val_temperature": 0,
    "datamodule.val_limit": 1,
    "datamodule.report_limit": 1,
    "engine.max_batch_size": 1,
    "runtime.num_threads": 1,
    "runtime.max_staleness": 0,
    "trainer.max_steps": 1,
    "trainer.val_check_interval": 1,
    "trainer.checkpoint_every": 1,
    "trainer.keep_checkpoints": 1,
}

ABOVE: Mapping[str, float] = {
    "optimizer.grad_clip": 0,
    "algorithm.clip_ratio_low": 0,
    "algorithm.clip_ratio_high": 0,
    "algorithm.dual_clip": 1,
    "algorithm.rollout_correction": 0,
    "datamodule.temperature": 0,
    "runtime.deadline_s": 0,
}

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
    _check_agents(cfg)
    if cfg.runtime.max_staleness > 0:
        raise NotAvailableError(
            f"runtime.max_staleness={cfg.runtime.max_staleness} is not available in this version; allowed: 0"
        )
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
        _bound(key, OmegaConf.select(cfg, key), at_least=bound)
    for key, bound in ABOVE.items():
        _bound(key, OmegaConf.select(cfg, key), above=bound)


def _bound(key: str, value: float | None, *, at_least: float | None = None, above: float | None = None) -> None:
    """None passes: a field that may be None is then switched off."""
    if value is None:
        return
    if at_least is not None and not at_least <= value < float("inf"):
        raise ConfigError(f"{key} is {value}; allowed: {at_least} or more")
    if above is not None and not above < value < float("inf"):
        raise ConfigError(f"{key} is {value}; allowed: more than {above}")


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


def _check_agents(cfg: DictConfig) -> None:
    if not any(agent.trained for agent in cfg.agents.values()):
        raise ConfigError(f"no agent is trained: set agents.<name>.trained=true for one of {', '.join(cfg.agents)}")
    bases: dict[str, tuple[str, DictConfig]] = {}
    for agent_id, agent in cfg.agents.items():
        key = f"agents.{agent_id}"
        _bound(f"{key}.lr", agent.lr, at_least=0)
        _bound(f"{key}.max_turns", agent.max_turns, at_least=1)
        _bound(f"{key}.max_new_tokens", agent.max_new_tokens, at_least=1)
        allowed, later = CHOICES["strategy"]
        check_choice(f"{key}.strategy", agent.strategy, allowed, later=later)
        for name in agent.tools:
            if name not in cfg.tools:
                listed = ", ".join(cfg.tools) or "none is configured"
                raise ConfigError(f"{key}.tools names {name!r}, which is no key of tools; allowed: {listed}")
        _check_model(f"{key}.model", agent.model)
        first_key, first = bases.setdefault(agent.model.path, (key, agent.model))
        if (first.lora is None) != (agent.model.lora is None) or first.dtype != agent.model.dtype:
            raise ConfigError(
                f"{first_key}.model and {key}.model are both {agent.model.path} but differ in lora or dtype: "
                "agents on one base share it"
            )
    named = cfg.workflow.get("order") or []
    for agent_id in named:
        if agent_id not in cfg.agents:
            raise ConfigError(f"workflow.order names {agent_id!r}, no key of agents; allowed: {', '.join(cfg.agents)}")


def _check_model(key: str, model: DictConfig) -> None:
    check_choice(f"{key}.dtype", model.dtype, DTYPES)
    _bound(f"{key}.context_length", model.context_length, at_least=2)
    lora = model.lora
    if lora is None:
        return
    _bound(f"{key}.lora.r", lora.r, at_least=1)
    _bound(f"{key}.lora.alpha", lora.alpha, at_least=1)
    if not 0 <= lora.dropout < 1:
        raise ConfigError(f"{key}.lora.dropout is {lora.dropout}; allowed: from 0 to below 1")
    modules = lora.target_modules
    if modules != "all-linear" and (isinstance(modules, str) or not modules):
        raise ConfigError(f"{key}.lora.target_modules is {modules!r}; allowed: all-linear or a list of modules")


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
    trained = ", ".join(agent_id for agent_id, agent in cfg.agents.items() if agent.trained)
    raise ConfigError(
        f"callbacks has no WeightSync, so the engine would go on sampling {trained} with old weights: "
        f"add +callbacks.weight_sync._target_={WEIGHT_SYNC}"
    )
