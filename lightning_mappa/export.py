"""`mappa export`, and the end of `fit`: the weights of a run as folders that others load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from lightning_mappa.agents import AgentFacts, agent_facts, load_agent
from lightning_mappa.errors import ConfigError
from lightning_mappa.models.load import export as write_model
from lightning_mappa.models.load import load_trained_tensors
from lightning_mappa.run_folder import RunFolder
from lightning_mappa.saved_weights import Selection, joint_selection, last_weights, read_tensors, weights_of_version
from lightning_mappa.shared_weights import agent_of, roles_of
from lightning_mappa.system import quiet_libraries

__all__ = ["Selection", "export", "export_agents", "joint_selection"]


def export(cfg: DictConfig) -> dict[str, Any]:
    """Writes a folder per agent from the run `cfg.run`, whose config `cfg` is, and says where and for which roles.

    Raises:
        ConfigError: no such agent or version, an agent that is frozen, or a folder with something in it.
        DataError: weights that are damaged, or none at all.
    """
    quiet_libraries()
    folder = RunFolder.open(Path(cfg.run))
    facts = agent_facts(cfg)
    trained = [agent_id for agent_id, one in facts.items() if one.trained]
    selection = _chosen(folder, trained, cfg.export.version)
    wanted = _wanted(cfg, trained)
    to = None if cfg.export.to is None else Path(cfg.export.to)
    if to is not None:
        _refuse_filled(to, wanted)
    with folder.writing() if to is None else nullcontext():
        written = export_agents(folder, cfg, {agent_id: facts[agent_id] for agent_id in wanted}, selection, to=to)
    roles = {agent_id: list(of_agent) for agent_id, of_agent in roles_of(cfg.agents).items() if agent_id in written}
    for agent_id, path in written.items():
        serves = "" if roles[agent_id] == [agent_id] else f", the weights of {', '.join(roles[agent_id])}"
        print(f"{agent_id}, version {selection.version}{serves}: {path}")
    return {
        "version": selection.version,
        "folders": {agent_id: str(path) for agent_id, path in written.items()},
        "roles": roles,
    }


def export_agents(
    folder: RunFolder,
    cfg: DictConfig,
    facts: Mapping[str, AgentFacts],
    selection: Selection | None,
    *,
    to: Path | None = None,
) -> dict[str, Path]:
    """Writes a folder for every trained agent: the selected weights, else those that training ended with.

    Everything is read from files, one model at a time: the Trainers may have been in other processes.

    Args:
        to: gets a folder per agent; None is the run's own export/.
    """
    written = {}
    for agent_id, one in facts.items():
        if one.trained:
            part = folder.last_tensors(agent_id) if selection is None else selection.tensors[agent_id]
            model = load_agent(cfg, one).model
            load_trained_tensors(model, read_tensors(part, model))
            written[agent_id] = folder.export(agent_id) if to is None else to / agent_id
            write_model(model, one.tokenizer, written[agent_id])
    return written


def _chosen(folder: RunFolder, trained: Sequence[str], version: str | None) -> Selection:
    if version == "last":
        return last_weights(folder, trained)
    if version is None or version == "selected":
        selection = joint_selection(folder, trained)
        if selection is not None:
            return selection
        if version is None:
            return last_weights(folder, trained)
        raise ConfigError(f"version=selected: {folder.path} holds no selected weights; allowed: last or a number")
    if not version.isdecimal():
        raise ConfigError(f"version={version} is no version; allowed: selected, last or a number")
    return weights_of_version(folder, trained, int(version))


def _refuse_filled(to: Path, agent_ids: Sequence[str]) -> None:
    for path in (to / agent_id for agent_id in agent_ids):
        if path.exists() and not (path.is_dir() and not any(path.iterdir())):
            raise ConfigError(f"to={to}: {path} is there already and not empty; name another folder")


def _wanted(cfg: DictConfig, trained: Sequence[str]) -> Sequence[str]:
    agent_id = cfg.export.agent
    if agent_id is None:
        return trained
    if agent_id not in trained:
        owner = agent_of(cfg.agents).get(agent_id)
        what = "is frozen and has its model's own weights" if owner else "is no agent of the run"
        if owner in trained:
            what = f"acts with the weights of {owner}"
        raise ConfigError(f"agent={agent_id} {what}; allowed: {', '.join(trained)}")
    return [agent_id]
