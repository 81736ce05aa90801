"""What a program did to the files of its workspace, as found by looking before and after."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from lightning_mappa.tools.collector import FileEntry, Listing


class FileEvent(StrEnum):
    CREATED = "created"
    CHANGED = "changed"
    REMOVED = "removed"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileChange:
    path: str
    """Relative to the workspace, in plain ASCII."""
    event: FileEvent
    size: int
    """Bytes it has now; 0 when it is gone."""


def changes_between(before: Listing, after: Listing) -> tuple[FileChange, ...]:
    """Files made, written or removed from one listing to the next, in the order of paths.

    A file that was moved or cut short by a limit of the listing counts as removed.
    """
    old, new = ({entry.path: entry for entry in listing.files} for listing in (before, after))
    changes = [_change(path, old.get(path), new.get(path)) for path in sorted(old.keys() | new.keys())]
    return tuple(change for change in changes if change is not None)


def _change(path: str, old: FileEntry | None, new: FileEntry | None) -> FileChange | None:
    if new is None:
        return FileChange(path=path, event=FileEvent.REMOVED, size=0)
    if old is None:
        return FileChange(path=path, event=FileEvent.CREATED, size=new.size)
    return None if old == new else FileChange(path=path, event=FileEvent.CHANGED, size=new.size)
