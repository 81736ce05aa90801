"""One agent's training: its module, and the Lightning Trainer whose only epoch is the run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.loggers import Logger
from omegaconf import DictConfig, OmegaConf

from lightning_mappa.agents import LoadedAgent
from lightning_mappa.build import build
from lightning_mappa.callbacks.last_tensors import LastTensors
from lightning_mappa.datamodules.rollout import RolloutDataModule
from lightning_mappa.errors import ConfigError
from lightning_mappa.module import AgentModule
from lightning_mappa.run_folder import RunFolder
from lightning_mappa.runtime.base import AgentLink
from lightning_mappa.runtime.cluster_environment import ExternalRanks
from lightning_mappa.strategies.build import build_strategy, check_checkpoint

LOSS_KEYS = (
    "policy_loss",
    "loss_agg_mode",
    "clip_ratio_low",
    "clip_ratio_high",
    "dual_clip",
    "rollout_correction",
    "mini_batch_size",
    "micro_batch_size",
    "micro_batch_tokens",
    "logprob_chunk_size",
    "max_skipped_steps",
)
OPTIMIZER_KEYS = ("betas", "weight_decay", "warmup_ratio", "min_lr_ratio", "grad_clip")


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentParts:
    """What one agent's Trainer is given. Each agent has callbacks and loggers of its own."""

    module: AgentModule
    callbacks: list[Callback]
    loggers: list[Logger]


def agent_parts(cfg: DictConfig, agent: LoadedAgent) -> AgentParts:
    """Raises `ConfigError` for an option that the module, a callback or a logger refuses."""
    callbacks = [build(node, f"callbacks.{name}") for name, node in cfg.callbacks.items()]
    for name, callback in zip(cfg.callbacks, callbacks, strict=True):
        if not isinstance(callback, Callback):
            raise ConfigError(f"callbacks.{name} is a {type(callback).__name__}; allowed: a Lightning Callback")
    loggers = [build(node, f"logger.{name}", name=agent.agent_id) for name, node in cfg.logger.items()]
    return AgentParts(module=agent_module(cfg, agent), callbacks=callbacks, loggers=loggers)


def train_agent(
    cfg: DictConfig,
    folder: RunFolder,
    parts: AgentParts,
    checkpoint: Path | None,
    link: AgentLink,
    ranks: ExternalRanks | None = None,
) -> None:
    """The agent's life in its thread or rank. Leaves its trained tensors in `folder.last_tensors` behind.

    Args:
        checkpoint: the joint one that the run goes on from.
        link: on several ranks a `RankLink`.
        ranks: of this process and its peers; a zero strategy needs them.

    Raises:
        ConfigError: the checkpoint is of another strategy or another number of ranks.
    """
    agent_id = parts.module.agent_id
    name = cfg.agents[agent_id].strategy
    world_size = 1 if ranks is None else ranks.world_size()
    part = None if checkpoint is None else checkpoint / f"{agent_id}.ckpt"
    if part is not None:
        check_checkpoint(part, agent_id, name, world_size)
    strategy = build_strategy(
        name,
        accelerator=cfg.trainer.accelerator,
        ranks=ranks,
        deadline_s=cfg.runtime.deadline_s,
        grad_clip=cfg.optimizer.grad_clip,
    )
    trainer = Trainer(
        accelerator=cfg.trainer.accelerator,
        precision=cfg.trainer.precision,
        strategy=strategy,
        devices=1,
        num_nodes=world_size,
        default_root_dir=folder.agent(agent_id),
        max_epochs=1,
        limit_train_batches=cfg.trainer.max_steps,
        val_check_interval=min(cfg.trainer.val_check_interval, cfg.trainer.max_steps),
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        use_distributed_sampler=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=any(isinstance(callback, Checkpoint) for callback in parts.callbacks),
        callbacks=[*parts.callbacks, LastTensors(folder.last_tensors(agent_id))],
        logger=parts.loggers or False,
    )
    trainer.fit(parts.module, datamodule=RolloutDataModule(link), ckpt_path=part, weights_only=True)


def agent_module(cfg: DictConfig, agent: LoadedAgent) -> AgentModule:
    node = cfg.agents[agent.agent_id]
    optimizer: Any = OmegaConf.to_container(cfg.optimizer)
    settings: dict[str, Any] = {
        **{key: cfg.algorithm[key] for key in LOSS_KEYS},
        **{key: optimizer[key] for key in OPTIMIZER_KEYS},
    }
    return AgentModule(
        agent.agent_id,
        agent.model,
        lr=node.lr,
        gradient_checkpointing=node.model.gradient_checkpointing,
        max_steps=cfg.trainer.max_steps,
        seed=cfg.seed,
        **settings,
    )
