"""Who wrote what, when and how large: the files of an episode's folder, as the harness found them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from lightning_mappa.tools.changes import FileEvent
from lightning_mappa.types import Action


@dataclass(frozen=True, slots=True, kw_only=True)
class TrailEntry:
    """One file that one action made, changed or removed."""

    path: str
    event: FileEvent
    size: int
    """Bytes it then had; 0 when it was removed."""
    agent_id: str
    role: str
    turn: int
    """The agent's turn, from 0."""
    step: int
    """The action's index in the episode."""


Folder = Mapping[str, TrailEntry | None]
"""Path → who wrote the file last; None where it came with the task. In the order of paths."""


def file_trail(actions: Iterable[Action]) -> tuple[TrailEntry, ...]:
    """What the programs of these actions did, in their order."""
    return tuple(
        TrailEntry(
            path=change.path,
            event=change.event,
            size=change.size,
            agent_id=action.agent_id,
            role=action.role,
            turn=action.turn,
            step=action.index,
        )
        for action in actions
        for result in action.tool_results
        for change in result.files
    )


def folder_after(task_files: Iterable[str], trail: Iterable[TrailEntry]) -> Folder:
    """What lies in the folder after all of the trail, when it began with the task's files."""
    files: dict[str, TrailEntry | None] = dict.fromkeys(task_files)
    for entry in trail:
        if entry.event is FileEvent.REMOVED:
            files.pop(entry.path, None)
        else:
            files[entry.path] = entry
    return dict(sorted(files.items()))


def missing(wanted: Sequence[str], folder: Folder) -> list[str]:
    """The wanted files that are not there, or that an agent has left without a byte."""
    return [path for path in wanted if path not in folder or ((entry := folder[path]) is not None and not entry.size)]


def listing(folder: Folder, first: Sequence[str] = (), limit: int = 40) -> list[str]:
    """A line per file, those in `first` before the others; past `limit` lines, one that counts the rest.

    What an agent is shown is bounded, however many files the one before it has left.
    """
    paths = list(dict.fromkeys([*(path for path in first if path in folder), *folder]))
    lines = [described(path, folder[path]) for path in paths[:limit]]
    return [*lines, f"and {len(paths) - limit} more files"] if len(paths) > limit else lines


def described(path: str, entry: TrailEntry | None) -> str:
    """One line on a file, for agents and coaches."""
    if entry is None:
        return f"{path} (came with the task)"
    return f"{path} ({entry.size} bytes, written by {entry.role} in turn {entry.turn + 1})"
