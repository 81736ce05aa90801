"""`mappa fit`: builds the parts of a run, lets them work, and leaves a run folder behind."""

from __future__ import annotations

import asyncio
import itertools
import warnings
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lightning_mappa.algorithm.advantages import CreditSettings
from lightning_mappa.audit.floor import require_floor
from lightning_mappa.coaches.base import (
    Coach,
    bind_accounts,
    can_be_put_back,
    halt_coach,
    learns_from_batches,
    remembers,
)
from lightning_mappa.driver import Driver, DriverSettings
from lightning_mappa.errors import ConfigError, Preempted, RankLost
from lightning_mappa.export import export_agents, joint_selection
from lightning_mappa.plan.arithmetic import evaluations_of
from lightning_mappa.progress import RunProgress
from lightning_mappa.record import RunRecord
from lightning_mappa.rollout.fingerprint import TOLERANCE
from lightning_mappa.rollout.ledger import Ledger, RewardSettings
from lightning_mappa.run_folder import RunFolder, restore_random_states
from lightning_mappa.runtime.base import Place
from lightning_mappa.runtime.board import Board
from lightning_mappa.runtime.place import place_for
from lightning_mappa.runtime.served_weights import ServedWeights
from lightning_mappa.splits import keep_splits
from lightning_mappa.stop import StopRequest
from lightning_mappa.system import (
    Environment,
    build_coordinator,
    build_environment,
    quiet_libraries,
    seed_everything,
)
from lightning_mappa.tasks.base import Split, TaskSource
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

_SETTLE_S = 600.0
"""A coach ends its calls by itself, within the time of one attempt; this is for one that does not."""


def fit(cfg: DictConfig) -> dict[str, Any]:
    """Trains, and returns what summary.json says. `cfg` is checked; `cfg.output_dir` or `cfg.resume` is set.

    The run folder is made once everything that can be wrong with config and data has been built.

    Raises:
        Preempted: after SIGINT or SIGTERM, once the last complete step is saved.
        MappaError: with its exit code, for everything that ends a run early.
    """
    quiet_libraries()
    require_floor(cfg)
    folder = RunFolder(Path(cfg.output_dir)) if cfg.resume is None else RunFolder.open(Path(cfg.resume))
    stop = StopRequest()
    for restarts in itertools.count():
        seed_everything(cfg)
        try:
            with closing(build_environment(cfg, scored=True)) as environment, closing(place_for(cfg)) as place:
                return _fit(cfg, folder, environment, place, stop, restarts)
        except RankLost as lost:
            if stop.requested:  # whoever told this process to stop may have ended the ranks as well
                raise Preempted(f"stopped when {lost}; go on with: mappa fit resume={folder.path}") from lost
            if restarts == cfg.runtime.max_restarts:
                raise
            warnings.warn(f"{lost}; the run goes on from its last joint checkpoint", stacklevel=2)
            cfg = OmegaConf.merge(cfg, {"resume": str(folder.path)})  # type: ignore[assignment]
    raise AssertionError("not reached")


def _fit(
    cfg: DictConfig, folder: RunFolder, environment: Environment, place: Place, stop: StopRequest, restarts: int
) -> dict[str, Any]:
    # 1. All that can be wrong with config and data shows here, before there is a folder.
    splits = {split: _tasks(environment.source, split) for split in ("train", "selection")}
    _check_coach(cfg, environment.coach)
    coordinator = build_coordinator(cfg, environment, place.facts, place.engine)
    place.prepare()
    ledger_settings = _credit_settings(cfg), _reward_settings(cfg)
    if cfg.resume is None:
        folder.create(cfg)

    with folder.writing():
        keep_splits(folder.splits, splits)

        # 2. Where the run stands: at step 0, or at its last joint checkpoint.
        checkpoint = None if cfg.resume is None else _last_checkpoint(folder)
        state = None if checkpoint is None else restore_random_states(checkpoint)
        first_step = 0 if state is None else int(state["version"])
        if first_step > cfg.trainer.max_steps:
            raise ConfigError(f"trainer.max_steps={cfg.trainer.max_steps}: the run has done {first_step} steps already")

        # 3. What is written down and shown of it.
        progress = RunProgress(cfg.trainer.max_steps, first_step, enabled=cfg.trainer.enable_progress_bar)
        coach = environment.coach
        record = RunRecord(
            folder,
            list(cfg.agents),
            progress,
            max_steps=cfg.trainer.max_steps,
            evaluations=evaluations_of(cfg.trainer.max_steps, cfg.trainer.val_check_interval),
            coach=coach,
            isolation=environment.isolation,
        )
        bind_accounts(coach, folder.path)
        if state is not None:
            record.load_state(state)
            coordinator.load_state(state)
        if cfg.resume is not None:
            folder.rewind(first_step)
            folder.write_config(cfg)

        # 4. What Trainers and driver share, and the driver.
        trained = {agent_id: facts.trained for agent_id, facts in place.facts.items()}
        ledger = Ledger(trained, *ledger_settings, first_version=first_step)
        board = Board(
            ledger,
            ServedWeights(
                place.engine,
                tolerances={agent_id: _tolerance(cfg, agent_id) for agent_id in ledger.trained_agents},
                staged=place.stages_weights or cfg.runtime.max_staleness > 0,
            ),
            place.turns,
            first_step=first_step,
            max_steps=cfg.trainer.max_steps,
        )
        driver = Driver(
            settings=_driver_settings(cfg),
            board=board,
            coordinator=coordinator,
            train_tasks=splits["train"],
            selection_tasks=splits["selection"][: cfg.datamodule.val_limit],
            folder=folder,
            record=record,
            stop=stop,
        )

        # 5. Work until the last Trainer has left, then sum up and export.
        with progress, stop.on_signals():
            try:
                place.train(board, folder, checkpoint, driver.drive)
            except BaseException as error:
                record.use(place.usage(), restarts=restarts)
                _sum_up(record, coach, status=f"{type(error).__name__}: {error}", selected_version=None)
                raise
        record.use(place.usage(), restarts=restarts)
        return _conclude(cfg, folder, record, coach, place, stopped=driver.stopped)


def _check_coach(cfg: DictConfig, coach: Coach) -> None:
    """Verdicts of a later rollout would reach such a coach before the batch of an earlier one is complete."""
    staleness = cfg.runtime.max_staleness
    if staleness > 0 and learns_from_batches(coach):
        raise ConfigError(f"runtime.max_staleness is {staleness}; allowed with a coach that learns from batches: 0")
    if cfg.datamodule.val_scored and not can_be_put_back(coach):
        raise ConfigError(
            f"datamodule.val_scored=true with the coach {coach.name}, which learns from batches and has no state_dict "
            "and load_state_dict: it would learn from evaluations too; allowed: false"
        )
    if staleness > 0 and cfg.datamodule.val_scored and remembers(coach):
        raise ConfigError(
            f"datamodule.val_scored=true with runtime.max_staleness={staleness} and a coach that remembers earlier "
            "verdicts: an evaluation would run into a rollout; allowed: runtime.max_staleness=0"
        )


def _conclude(
    cfg: DictConfig, folder: RunFolder, record: RunRecord, coach: Coach, place: Place, *, stopped: bool
) -> dict[str, Any]:
    place.close()  # what the Trainers and engines hold is not needed any more
    selection = joint_selection(folder, [agent_id for agent_id, facts in place.facts.items() if facts.trained])
    summary = _sum_up(
        record,
        coach,
        status="preempted" if stopped else "done",
        selected_version=None if selection is None else selection.version,
    )
    if stopped:
        raise Preempted(f"stopped after {summary['steps']} steps; go on with: mappa fit resume={folder.path}")
    export_agents(folder, cfg, place.facts, selection)
    print(_last_words(folder, summary))
    return summary


def _sum_up(record: RunRecord, coach: Coach, *, status: str, selected_version: int | None) -> dict[str, Any]:
    """The summary with what the coach's calls in flight have cost. It is written before them, too: who has told the
    run to stop may not wait for them."""
    record.write_summary(status=status, selected_version=selected_version)
    try:
        asyncio.run(asyncio.wait_for(halt_coach(coach, f"the run has ended: {status}"), _SETTLE_S))
    except Exception as error:  # What ends the run matters more.
        warnings.warn(f"calls of the coach may be missing in the summary: {type(error).__name__} {error}", stacklevel=2)
    return record.write_summary(status=status, selected_version=selected_version)


def _last_checkpoint(folder: RunFolder) -> Path | None:
    """None where the run ended before its first: it begins anew, and what its coach was paid for is kept."""
    if not folder.has_checkpoints:
        return None
    checkpoint, passed_over = folder.last_checkpoint()
    for fault in passed_over:
        warnings.warn(f"passed over a damaged checkpoint: {fault}", stacklevel=2)
    return checkpoint


def _tasks(source: TaskSource, split: Split) -> Sequence[Task]:
    tasks = source.tasks(split)
    if not tasks:
        raise ConfigError(f"task: the {split} split holds no task")
    return tasks


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
        val_scored=data.val_scored,
        checkpoint_every=trainer.checkpoint_every,
        keep_checkpoints=trainer.keep_checkpoints,
        max_staleness=cfg.runtime.max_staleness,
    )


def _tolerance(cfg: DictConfig, agent_id: str) -> float:
    """Of the coarser of the two precisions that are compared: the engine's and the trainer's forward."""
    dtype = "bfloat16" if cfg.trainer.precision.startswith("bf16") else cfg.agents[agent_id].model.dtype
    return TOLERANCE[dtype]


def _last_words(folder: RunFolder, summary: Mapping[str, Any]) -> str:
    success = summary["val"]["success"]
    shown = " → ".join("?" if value is None else f"{value:.3f}" for value in success.values())
    return (
        f"success on the selection split (n = {summary['val']['n']} episodes): {shown} "
        f"at version {summary['selected_version']}, {summary['wall_s']:.0f} s\n"
        f"run folder: {folder.path}\n"
        f"unbiased figures: mappa test {folder.path}"
    )
