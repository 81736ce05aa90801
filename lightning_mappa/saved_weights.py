"""The versions of a whole system that a run folder holds, and the tensors in them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from lightning_mappa.errors import ConfigError, DataError
from lightning_mappa.files import read_json, verify
from lightning_mappa.models.load import trained_tensors
from lightning_mappa.run_folder import RunFolder

VERSION = "version"
"""Key in a safetensors file's metadata: the policy version of its tensors."""
IN_CHECKPOINT = "policy.model."
"""What an `AgentModule` calls its model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """One version of the whole system."""

    version: int
    tensors: Mapping[str, Path]
    """Per trained agent a file of trained tensors, or its part of a joint checkpoint; see `read_tensors`."""


def joint_selection(folder: RunFolder, agent_ids: Iterable[str]) -> Selection | None:
    """What CheckpointSelection kept; None when nothing was selected.

    A team is only as evaluated together: where a run broke off and some agents know of one evaluation more
    than others, it is the last version that all of them hold. Raises `DataError` when there is none.
    """
    agent_ids = tuple(agent_ids)
    held = _selected_files(folder, agent_ids)
    if not held:
        return None
    joint = set.intersection(*map(set, held.values()))
    if len(held) != len(agent_ids) or not joint:
        versions = {agent_id: sorted(files) for agent_id, files in held.items()}
        raise DataError(f"the agents hold selected weights of different versions: {versions}")
    version = max(joint)
    return Selection(version=version, tensors={agent_id: files[version] for agent_id, files in held.items()})


def last_weights(folder: RunFolder, agent_ids: Sequence[str]) -> Selection:
    """What training ended with, or the newest joint checkpoint where the run went on from there and broke off.

    Raises `DataError` when there is neither.
    """
    checkpoint = _last_checkpoint(folder, agent_ids)
    ended = _ended(folder, agent_ids)
    if ended is None and checkpoint is None:
        raise DataError(f"{folder.path} holds no weights: it has neither ended nor saved a checkpoint")
    both = [one for one in (checkpoint, ended) if one is not None]
    return max(both, key=lambda one: one.version)  # of two alike the checkpoint, which comes first


def weights_of_version(folder: RunFolder, agent_ids: Sequence[str], version: int) -> Selection:
    """Raises `ConfigError`, with what there is, when the folder does not hold this version of every agent."""
    held = _selected_files(folder, agent_ids)
    found: dict[int, Selection] = {}
    for number in set.intersection(*map(set, held.values())) if len(held) == len(agent_ids) else ():
        found[number] = Selection(version=number, tensors={agent_id: held[agent_id][number] for agent_id in agent_ids})
    for path in folder.checkpoints.glob("step-*"):
        one = _checkpoint(path, agent_ids)
        found.setdefault(one.version, one)
    ended = _ended(folder, agent_ids)
    if ended is not None:
        found.setdefault(ended.version, ended)
    if version not in found:
        there = ", ".join(map(str, sorted(found))) or "none"
        raise ConfigError(f"version={version} is not in {folder.path}; allowed: {there}, selected, last")
    chosen = found[version]
    _check_whole(folder, chosen)
    return chosen


def read_tensors(part: Path, model: PreTrainedModel | PeftModel) -> dict[str, Tensor]:
    """The tensors that `load_trained_tensors` takes.

    Args:
        part: a safetensors file of them; a Lightning checkpoint of an `AgentModule`; or the folder that one with a
            zero strategy leaves, whose float32 master weights are put together again (needs DeepSpeed).
        model: of the same agent.
    """
    if part.suffix == ".safetensors":
        return load_file(part)
    state = (
        _zero_state(part) if part.is_dir() else torch.load(part, map_location="cpu", weights_only=True)["state_dict"]
    )
    adapter = re.compile(r"(\.lora_\w+)\.default(?=\.|$)") if isinstance(model, PeftModel) else None
    named = {}
    for name, tensor in state.items():
        own = name.removeprefix(IN_CHECKPOINT)
        named[own if adapter is None else adapter.sub(r"\1", own)] = tensor
    wanted = trained_tensors(model)
    return {name: named[name] for name in wanted if name in named}


def _lightning_state(part: Path) -> Mapping[str, Tensor]:
    checkpoint = torch.load(part, map_location="cpu", weights_only=True)
    state: Mapping[str, Tensor] = checkpoint["state_dict"]
    return state


def _zero_state(part: Path) -> Mapping[str, Tensor]:
    try:
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{part} was saved by a zero strategy, and DeepSpeed, which reads it, is not installed: "
            "pip install 'lightning-mappa[deepspeed]'"
        ) from error
    state: Mapping[str, Tensor] = get_fp32_state_dict_from_zero_checkpoint(str(part), exclude_frozen_parameters=True)
    return state


def _selected_files(folder: RunFolder, agent_ids: Iterable[str]) -> dict[str, dict[int, Path]]:
    """Agent → the versions it holds, the selected one and the one before it; agents without any are left out."""
    held = {}
    for agent_id in agent_ids:
        place = folder.agent(agent_id) / "selected"
        if (place / "selected.json").is_file():
            entry: dict[str, Any] = read_json(place / "selected.json")
            both = (entry, entry.get("previous"))
            held[agent_id] = {one["version"]: place / one["tensors"] for one in both if one is not None}
    return held


def _ended(folder: RunFolder, agent_ids: Sequence[str]) -> Selection | None:
    """What every agent wrote at the end of its training; None unless all did, at the same version."""
    files = {agent_id: folder.last_tensors(agent_id) for agent_id in agent_ids}
    if not all(path.is_file() for path in files.values()):
        return None
    versions = {_version_in(path) for path in files.values()}
    return Selection(version=versions.pop(), tensors=files) if len(versions) == 1 else None


def _version_in(path: Path) -> int:
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
    if VERSION not in metadata:
        raise DataError(f"{path} does not say which version it holds")
    return int(metadata[VERSION])


def _last_checkpoint(folder: RunFolder, agent_ids: Sequence[str]) -> Selection | None:
    if not folder.has_checkpoints:
        return None
    return _checkpoint(folder.last_checkpoint()[0], agent_ids)


def _checkpoint(path: Path, agent_ids: Sequence[str]) -> Selection:
    version = int(path.name.removeprefix("step-"))
    return Selection(version=version, tensors={agent_id: path / f"{agent_id}.ckpt" for agent_id in agent_ids})


def _check_whole(folder: RunFolder, selection: Selection) -> None:
    for path in {part.parent for part in selection.tensors.values() if part.suffix == ".ckpt"}:
        fault = verify(path)
        if fault is not None:
            raise DataError(f"version={selection.version}: the checkpoint {path} is damaged: {fault}")
