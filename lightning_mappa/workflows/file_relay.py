"""Agents that work in one folder, one after the other, and hand files on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_mappa.errors import ConfigError
from lightning_mappa.file_trail import TrailEntry, folder_after, listing, missing
from lightning_mappa.types import Task
from lightning_mappa.workflows.base import Message, Seat
from lightning_mappa.workflows.sequential import VISIBILITIES


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One agent's part: the files it needs to find and those that it must leave behind."""

    agent_id: str
    needs: tuple[str, ...] = ()
    makes: tuple[str, ...] = ()


class FileRelay:
    """Each agent acts once, in the order of `stages`; what counts in the end are the files.

    An agent's prompt has, beside `task` and `seen`: `files`, a line with size and author for each file that the harness
    found in the folder, first those that some stage names, a few dozens at most; `missing`, what this agent needs and
    is not there; `makes`, what it must leave behind.
    Nobody is skipped: an agent that finds its inputs missing may make them.

    Args:
        stages: agent id → `needs` and `makes`, lists of paths in the folder.
        visibility: with full an agent reads what all earlier ones said, with partial only the previous one.
    """

    def __init__(self, stages: Mapping[str, Mapping[str, Sequence[str]]], visibility: str = "full") -> None:
        if visibility not in VISIBILITIES:
            raise ConfigError(f"workflow.visibility={visibility}: allowed are {', '.join(VISIBILITIES)}")
        self._stages = read_stages(stages, "workflow.stages")
        self._visibility = visibility

    @property
    def agent_ids(self) -> Sequence[str]:
        return tuple(stage.agent_id for stage in self._stages)

    @property
    def last_agent_id(self) -> str:
        return self._stages[-1].agent_id

    async def run(self, task: Task, agents: Mapping[str, Seat]) -> str:
        """Returns the last agent's text; the task's own files are those of `task.metadata["files"]`."""
        said: list[Message] = []
        trail: list[TrailEntry] = []
        known = [path for stage in self._stages for path in (*stage.needs, *stage.makes)]
        for stage in self._stages:
            folder = folder_after(task.metadata.get("files", ()), trail)
            extra: dict[str, Any] = {
                "files": listing(folder, known),
                "missing": missing(stage.needs, folder),
                "makes": list(stage.makes),
            }
            seen = said if self._visibility == "full" else said[-1:]
            message = await agents[stage.agent_id].act(task, tuple(seen), **extra)
            said.append(message)
            trail += message.files
        return said[-1].text


def read_stages(stages: Mapping[str, Mapping[str, Sequence[str]]], key: str) -> tuple[Stage, ...]:
    """Stages as a config has them; `key` is where. Raises `ConfigError` for anything else."""
    if not stages:
        raise ConfigError(f"{key} is empty; name at least one agent, with the files that it needs and makes")
    return tuple(_stage(agent_id, dict(files or {}), f"{key}.{agent_id}") for agent_id, files in stages.items())


def _stage(agent_id: str, files: Mapping[str, Any], where: str) -> Stage:
    unknown = sorted(set(files) - {"needs", "makes"})
    if unknown:
        raise ConfigError(f"{where}.{unknown[0]}: allowed are needs and makes, lists of files")
    for name, paths in files.items():
        if isinstance(paths, str) or not all(isinstance(path, str) and path for path in paths):
            raise ConfigError(f"{where}.{name}={paths}: must be a list of files, like [train.csv]")
    return Stage(agent_id=agent_id, needs=tuple(files.get("needs", ())), makes=tuple(files.get("makes", ())))
