"""`mappa recoach RUN coach=…`: what another coach, rubric or credit would have made of a recorded run."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from lightning_mappa.agent_trainer import agent_module
from lightning_mappa.agents import AgentFacts, agent_facts, load_agent
from lightning_mappa.algorithm.advantages import CreditSettings
from lightning_mappa.audit.watched import not_ended
from lightning_mappa.build import build
from lightning_mappa.coaches.base import Coach, accounts, bind_accounts, check_coach, close_coach
from lightning_mappa.coaches.watch import missing_watch
from lightning_mappa.config import structured
from lightning_mappa.console import table_console
from lightning_mappa.datamodules.transcript import RecordedStep, RecordedSteps, step_files
from lightning_mappa.errors import CoachError, ConfigError, MappaError
from lightning_mappa.files import write_json
from lightning_mappa.fit import CREDIT_KEYS
from lightning_mappa.recoach.figures import advantage_figures, verdict_figures
from lightning_mappa.recoach.overrides import changed, deciding, differs, side_of
from lightning_mappa.recoach.rescore import advantages, recredited, rescored, verdicts_by_action
from lightning_mappa.recoach.table import show
from lightning_mappa.recoach.update import Side, compare_updates
from lightning_mappa.rollout.ledger import RewardSettings
from lightning_mappa.rollout.transcripts import read_episodes
from lightning_mappa.run_folder import RunFolder
from lightning_mappa.seeds import derive_seed
from lightning_mappa.shared_weights import agent_of
from lightning_mappa.system import quiet_libraries, seed_everything
from lightning_mappa.types import ActionKey, ScoredEpisode, Verdict
from lightning_mappa.workflows.base import Workflow, last_agent_id


@dataclass(slots=True)
class _Sides:
    """What a run has recorded, and the same with the new verdicts and the new credit."""

    keys: dict[str, list[ActionKey]] = field(default_factory=dict)
    """Key of the config's `agents` → its actions."""
    recorded: dict[ActionKey, Verdict] = field(default_factory=dict)
    new: dict[ActionKey, Verdict] = field(default_factory=dict)
    recorded_advantages: dict[ActionKey, float | None] = field(default_factory=dict)
    new_advantages: dict[ActionKey, float | None] = field(default_factory=dict)
    recorded_steps: dict[int, RecordedStep] = field(default_factory=dict)
    """Those whose update is compared."""
    new_steps: dict[int, RecordedStep] = field(default_factory=dict)
    episodes: int = 0
    steps: int = 0


def recoach(cfg: DictConfig) -> dict[str, Any]:
    """Writes RUN/recoach-<name>.json and prints a table; `cfg` is the run's config with what was overridden in it.

    The coach is asked where its config is another than the run's, or where `recoach.rescore` says so; else the
    recorded verdicts stay. Its calls are logged in RUN/recoach-<name>/, which a second attempt goes on with. The
    recorded side has the run's own algorithm, the new side that of `cfg`: rewards, credit and loss.

    Raises:
        ConfigError: nothing differs from the run, or something does that changes nothing here (`overrides`); there is
            a report of that name, or no transcripts.
        DataError: a damaged transcript.
        CoachError: the new coach's budget is spent, or too many of its verdicts are missing
            (`coach.max_missing_rate`); there is no report then.
    """
    folder = RunFolder.open(Path(cfg.run))
    recorded = structured(folder.config())
    algorithm = changed(recorded, cfg)
    asks = cfg.recoach.rescore or differs(recorded, cfg)
    if not (asks or algorithm):
        raise ConfigError(
            f"nothing differs from run={cfg.run}: give coach=OPTION, coach.KEY=VALUE, algorithm.KEY=VALUE, "
            "or recoach.rescore=true to ask the run's own coach once more"
        )
    quiet_libraries()
    seed_everything(cfg)
    coach: Coach = build(cfg.coach, "coach")
    name = cfg.recoach.name or _name(coach, cfg)
    path = folder.path / f"recoach-{name}.json"
    if path.exists():
        raise ConfigError(f"{path} is there already: give another recoach.name, or remove it")
    try:
        with folder.writing():
            if asks:
                asyncio.run(check_coach(coach))
                bind_accounts(coach, folder.path / f"recoach-{name}")
            sides = asyncio.run(_both_sides(cfg, recorded, folder, coach if asks else None))
            report = {
                "name": name,
                "run": str(folder.path),
                "coach": {
                    "recorded": sorted({verdict.coach for verdict in sides.recorded.values()}),
                    "new": coach.name,
                    "asked": bool(asks),
                },
                "algorithm": algorithm,
                "steps": sides.steps,
                "episodes": sides.episodes,
                "agents": _agents(cfg, recorded, sides),
                "accounts": dict(accounts(coach)) if asks else {},
            }
            write_json(path, report)
    except CoachError as error:
        raise not_ended("recoach", coach, error) from error
    finally:
        close_coach(coach)
    show(report, table_console())
    print(path)
    return report


async def _both_sides(cfg: DictConfig, recorded: DictConfig, folder: RunFolder, coach: Coach | None) -> _Sides:
    """Step by step, so that a coach that learns from batches sees those of the run. None keeps the verdicts."""
    workflow: Workflow = build(cfg.workflow, "workflow")
    steps = RecordedSteps(folder.path)
    files = step_files(folder.path)
    sides = _Sides(keys={agent_id: [] for agent_id in cfg.agents})
    watch = missing_watch(cfg.coach)
    limit = len(steps) if cfg.recoach.max_steps is None else cfg.recoach.max_steps
    for number in list(steps)[:limit]:
        step, before = steps[number], read_episodes(files[number])
        after = (
            before
            if coach is None
            else await rescored(coach, before, last_agent_id(workflow), watch, cfg.runtime.deadline_s)
        )
        new_step = recredited(step, after, _reward_settings(cfg))
        _add(sides, before, after)
        sides.recorded_advantages |= advantages(step, _credit_settings(recorded))
        sides.new_advantages |= advantages(new_step, _credit_settings(cfg))
        if sides.steps < cfg.recoach.update_steps:
            sides.recorded_steps[number], sides.new_steps[number] = step, new_step
        sides.steps += 1
        sides.episodes += len(before)
    return sides


def _add(sides: _Sides, before: Sequence[ScoredEpisode], after: Sequence[ScoredEpisode]) -> None:
    for scored in before:
        for action in scored.episode.actions:
            sides.keys[action.agent_id].append((scored.episode.id, action.index))
    sides.recorded |= verdicts_by_action(before)
    sides.new |= verdicts_by_action(after)


def _agents(cfg: DictConfig, recorded: DictConfig, sides: _Sides) -> dict[str, Any]:
    try:
        facts: Mapping[str, AgentFacts] | str = agent_facts(cfg)
    except (MappaError, OSError) as error:
        facts = f"the weights cannot be loaded: {error}"
    return {
        agent_id: {
            "verdicts": verdict_figures(keys, sides.recorded, sides.new),
            "advantages": advantage_figures(keys, sides.recorded_advantages, sides.new_advantages),
            "update": _update(cfg, recorded, agent_id, facts, sides),
        }
        for agent_id, keys in sides.keys.items()
    }


def _update(
    cfg: DictConfig, recorded: DictConfig, agent_id: str, facts: Mapping[str, AgentFacts] | str, sides: _Sides
) -> dict[str, Any]:
    """`cosine`, or None and the reason."""
    steps = list(sides.recorded_steps)
    if not steps:
        return _no_update("recoach.update_steps is 0")
    owner = agent_of(cfg.agents)[agent_id]
    if owner != agent_id:
        return _no_update(f"it acts with the weights of {owner}, whose update holds its actions")
    if not cfg.agents[agent_id].trained:
        return _no_update("the agent is not trained")
    if isinstance(facts, str):
        return _no_update(facts)
    try:
        agent = load_agent(cfg, facts[agent_id])
    except (MappaError, OSError) as error:
        return _no_update(f"the weights cannot be loaded: {error}")
    try:
        direction = compare_updates(
            *(
                Side(module=agent_module(side, agent), steps=its_steps, settings=_credit_settings(side))
                for side, its_steps in (
                    (side_of(recorded, cfg), sides.recorded_steps),
                    (cfg, sides.new_steps),
                )
            ),
            accelerator=cfg.trainer.accelerator,
            seed=derive_seed(cfg.seed, "recoach", agent_id),
        )
    except MappaError as error:
        return _no_update(f"no gradient: {error}")
    reason = None
    if direction.cosine is None:
        zero = [side for side in ("recorded", "new") if getattr(direction, f"norm_{side}") == 0]
        reason = f"the gradient of the {' and the '.join(zero)} verdicts is zero"
    return {**asdict(direction), "steps": steps, "reason": reason}


def _no_update(reason: str) -> dict[str, Any]:
    return {"cosine": None, "norm_recorded": None, "norm_new": None, "steps": [], "reason": reason}


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


def _name(coach: Coach, cfg: DictConfig) -> str:
    """The same for the same coach and algorithm, so that an interrupted attempt is gone on with."""
    content = json.dumps(deciding(cfg), sort_keys=True, default=str)
    slug = re.sub(r"[^\w.-]+", "-", coach.name)
    return f"{slug}-{hashlib.sha256(content.encode()).hexdigest()[:8]}"
