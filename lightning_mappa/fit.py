"""`mappa fit`: builds the parts of a run, lets them work, and leaves a run folder behind."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.loggers import Logger
from omegaconf import DictConfig, OmegaConf

from lightning_mappa.algorithm.advantages import CreditSettings
from lightning_mappa.build import build
from lightning_mappa.datamodules.rollout import RolloutDataModule
from lightning_mappa.driver import Driver, DriverSettings
from lightning_mappa.errors import ConfigError, Preempted
from lightning_mappa.export import export_agents, joint_selection
from lightning_mappa.module import AgentModule
from lightning_mappa.progress import RunProgress
from lightning_mappa.record import RunRecord
from lightning_mappa.rollout.ledger import Ledger, RewardSettings
from lightning_mappa.run_folder import RunFolder, restore_random_states
from lightning_mappa.runtime.local import LocalLink, LocalRuntime
from lightning_mappa.stop import StopRequest
from lightning_mappa.system import (
    Environment,
    LoadedAgent,
    build_coordinator,
    build_engine,
    build_environment,
    load_agents,
    quiet_libraries,
    seed_everything,
)
from lightning_mappa.tasks.base import TaskSource
from lightning_mappa.types import Task

CREDIT_KEYS = (
    "adv_estimator",
    "return_scope",
    "return_level",
    "return_agg",
    "baseline",
    "norm_scope",
    "norm_unit",
)
LOSS_KEYS = (
    "policy_loss",
    "loss_agg_mode",
    "clip_ratio_low",
    "clip_ratio_high",
    "dual_clip",
    "rollout_correction",
    "mini_batch_size",
    "micro_batch_size",
    "logprob_chunk_size",
    "max_skipped_steps",
)
OPTIMIZER_KEYS = ("betas", "weight_decay", "warmup_ratio", "min_lr_ratio", "grad_clip")


def fit(cfg: DictConfig) -> dict[str, Any]:
    """Trains, and returns what summary.json says. `cfg` is checked; `cfg.output_dir` or `cfg.resume` is set.

    The run folder is made once everything that can be wrong with config and data has been built.

    Raises:
        Preempted: after SIGINT or SIGTERM, once the last complete step is saved.
        MappaError: with its exit code, for everything that ends a run early.
    """
    quiet_libraries()
    seed_everything(cfg)
    folder = RunFolder(Path(cfg.output_dir)) if cfg.resume is None else RunFolder.open(Path(cfg.resume))
    with closing(build_environment(cfg)) as environment:
        return _fit(cfg, folder, environment)


def _fit(cfg: DictConfig, folder: RunFolder, environment: Environment) -> dict[str, Any]:
    train_tasks, selection_tasks = (_tasks(environment.source, cfg, split) for split in ("train", "selection"))
    agents = load_agents(cfg)
    engine = build_engine(cfg, agents)
    coordinator = build_coordinator(cfg, environment, agents, engine)
    modules = {agent_id: _module(cfg, agent) for agent_id, agent in agents.items() if agent.trained}
    kits = {agent_id: _kit(cfg, folder, agent_id) for agent_id in modules}
    if cfg.resume is None:
        folder.create(cfg)

    with folder.writing():
        checkpoint = None if cfg.resume is None else _last_checkpoint(folder)
        state = None if checkpoint is None else restore_random_states(checkpoint)
        first_step = 0 if state is None else int(state["version"])
        trained = {agent_id: agent.trained for agent_id, agent in agents.items()}
        runtime = LocalRuntime(
            Ledger(trained, _credit_settings(cfg), _reward_settings(cfg), first_version=first_step),
            engine,
            first_step=first_step,
            max_steps=cfg.trainer.max_steps,
            deadline_s=cfg.runtime.deadline_s,
        )
        progress = RunProgress(cfg.trainer.max_steps, first_step, enabled=cfg.trainer.enable_progress_bar)
        record = RunRecord(folder, list(agents), progress)
        if state is not None:
            record.load_state(state)
            folder.rewind(first_step)
        driver = Driver(
            settings=_driver_settings(cfg),
            runtime=runtime,
            coordinator=coordinator,
            train_tasks=train_tasks,
            selection_tasks=selection_tasks,
            folder=folder,
            record=record,
            stop=StopRequest(),
        )
        bodies = {
            agent_id: _trainer_body(cfg, folder, checkpoint, module, kits[agent_id])
            for agent_id, module in modules.items()
        }
        _work(runtime, driver, bodies, progress)
        return _conclude(folder, record, agents, modules, stopped=driver.stopped)


def _work(
    runtime: LocalRuntime,
    driver: Driver,
    bodies: Mapping[str, Callable[[LocalLink], None]],
    progress: RunProgress,
) -> None:
    """Until the last Trainer has left. A run that breaks off says why in its summary."""
    with progress, driver.stop.on_signals():
        try:
            runtime.run(bodies, driver.drive)
        except BaseException as error:
            driver.record.write_summary(status=f"{type(error).__name__}: {error}", selected_version=None)
            raise


def _conclude(
    folder: RunFolder,
    record: RunRecord,
    agents: Mapping[str, LoadedAgent],
    modules: Mapping[str, AgentModule],
    *,
    stopped: bool,
) -> dict[str, Any]:
    selection = joint_selection(folder, modules)
    summary = record.write_summary(
        status="preempted" if stopped else "done",
        selected_version=None if selection is None else selection.version,
    )
    if stopped:
        raise Preempted(f"stopped after {summary['steps']} steps; go on with: mappa fit resume={folder.path}")
    export_agents(folder, agents, modules, selection)
    print(_last_words(folder, summary))
    return summary


@dataclass(frozen=True, slots=True, kw_only=True)
class Kit:
    """What the config gives one agent's Trainer beside the module."""

    callbacks: list[Callback]
    loggers: list[Logger]


def _kit(cfg: DictConfig, folder: RunFolder, agent_id: str) -> Kit:
    callbacks = [build(node, f"callbacks.{name}") for name, node in cfg.callbacks.items()]
    for name, callback in zip(cfg.callbacks, callbacks, strict=True):
        if not isinstance(callback, Callback):
            raise ConfigError(f"callbacks.{name} is a {type(callback).__name__}; allowed: a Lightning Callback")
    loggers = [build(node, f"logger.{name}", name=agent_id) for name, node in cfg.logger.items()]
    return Kit(callbacks=callbacks, loggers=loggers)


def _trainer_body(
    cfg: DictConfig, folder: RunFolder, checkpoint: Path | None, module: AgentModule, kit: Kit
) -> Callable[[LocalLink], None]:
    """One agent's life in its thread: a Lightning Trainer whose only epoch is the run."""

    def body(link: LocalLink) -> None:
        trainer = Trainer(
            accelerator=cfg.trainer.accelerator,
            devices=1,
            default_root_dir=folder.agent(module.agent_id),
            max_epochs=1,
            limit_train_batches=cfg.trainer.max_steps,
            val_check_interval=min(cfg.trainer.val_check_interval, cfg.trainer.max_steps),
            check_val_every_n_epoch=None,
            num_sanity_val_steps=0,
            log_every_n_steps=1,
            use_distributed_sampler=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=any(isinstance(callback, Checkpoint) for callback in kit.callbacks),
            callbacks=kit.callbacks,
            logger=kit.loggers or False,
        )
        part = None if checkpoint is None else checkpoint / f"{module.agent_id}.ckpt"
        trainer.fit(module, datamodule=RolloutDataModule(link), ckpt_path=part, weights_only=True)

    return body


def _last_checkpoint(folder: RunFolder) -> Path:
    checkpoint, passed_over = folder.last_checkpoint()
    for fault in passed_over:
        warnings.warn(f"passed over a damaged checkpoint: {fault}", stacklevel=2)
    return checkpoint


def _module(cfg: DictConfig, agent: LoadedAgent) -> AgentModule:
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
        **settings,
    )


def _tasks(source: TaskSource, cfg: DictConfig, split: str) -> Sequence[Task]:
    tasks = source.tasks(split)  # type: ignore[arg-type]
    limit = cfg.datamodule.val_limit if split == "selection" else None
    if not tasks:
        raise ConfigError(f"task: the {split} split holds no task")
    return tasks[:limit]


def _credit_settings(cfg: DictConfig) -> CreditSettings:
    return CreditSettings(**{key: cfg.algorithm[key] for key in CREDIT_KEYS})


def _reward_settings(cfg: DictConfig) -> RewardSettings:
    algorithm = cfg.algorithm
    return RewardSettings(
        mode=algorithm.reward,
        process_weight=algorithm.process_weight,
        outcome_weight=algorithm.outcome_weight,
        truncated=algorithm.truncated,
    )


def _driver_settings(cfg: DictConfig) -> DriverSettings:
    data, trainer = cfg.datamodule, cfg.trainer
    return DriverSettings(
        seed=cfg.seed,
        rollout_batch_size=data.rollout_batch_size,
        n_samples_per_prompt=data.n_samples_per_prompt,
        temperature=data.temperature,
        val_n_samples=data.val_n_samples,
        val_temperature=data.val_temperature,
        checkpoint_every=trainer.checkpoint_every,
        keep_checkpoints=trainer.keep_checkpoints,
    )


def _last_words(folder: RunFolder, summary: Mapping[str, Any]) -> str:
    success = summary["val"]["success"]
    shown = " → ".join("?" if value is None else f"{value:.3f}" for value in success.values())
    return (
        f"success on the selection split (n = {summary['val']['n']}): {shown} "
        f"at version {summary['selected_version']}, {summary['wall_s']:.0f} s\n"
        f"run folder: {folder.path}\n"
        f"unbiased figures: mappa test {folder.path}"
    )
