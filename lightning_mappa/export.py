"""The weights a run ends with, as folders that others load: the best joint version of every agent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig
from safetensors.torch import load_file

from lightning_mappa.agents import AgentFacts, load_agent
from lightning_mappa.errors import DataError
from lightning_mappa.files import read_json
from lightning_mappa.models.load import export, load_trained_tensors
from lightning_mappa.run_folder import RunFolder


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """One version of the whole system."""

    version: int
    tensors: Mapping[str, Path]
    """A file of trained tensors per trained agent."""


def joint_selection(folder: RunFolder, agent_ids: Iterable[str]) -> Selection | None:
    """What CheckpointSelection kept; None when nothing was selected.

    A team is only as evaluated together: where a run broke off and some agents know of one evaluation more
    than others, it is the last version that all of them hold. Raises `DataError` when there is none.
    """
    agent_ids = tuple(agent_ids)
    entries = {
        agent_id: read_json(path)
        for agent_id in agent_ids
        if (path := folder.agent(agent_id) / "selected" / "selected.json").is_file()
    }
    if not entries:
        return None
    held = {
        agent_id: {one["version"]: one["tensors"] for one in (entry, entry.get("previous")) if one is not None}
        for agent_id, entry in entries.items()
    }
    joint = set.intersection(*map(set, held.values()))
    if len(held) != len(agent_ids) or not joint:
        versions = {agent_id: sorted(files) for agent_id, files in held.items()}
        raise DataError(f"the agents hold selected weights of different versions: {versions}")
    version = max(joint)
    return Selection(
        version=version,
        tensors={agent_id: folder.agent(agent_id) / "selected" / files[version] for agent_id, files in held.items()},
    )


def export_agents(
    folder: RunFolder, cfg: DictConfig, facts: Mapping[str, AgentFacts], selection: Selection | None
) -> None:
    """Writes export/<agent> for every trained agent: the selected weights, else those that training ended with.

    Everything is read from files, one model at a time: the Trainers may have been in other processes.
    """
    for agent_id, one in facts.items():
        if one.trained:
            tensors = folder.last_tensors(agent_id) if selection is None else selection.tensors[agent_id]
            model = load_agent(cfg, one).model
            load_trained_tensors(model, load_file(tensors))
            export(model, one.tokenizer, folder.export(agent_id))
