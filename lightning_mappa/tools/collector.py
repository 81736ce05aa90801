"""What a workspace holds, and copies of it, taken by a process that programs must not be able to fool.

It runs while nothing in the slot is alive. Nothing is believed but what an open descriptor says, every name is
opened below the descriptor of its folder without following a link, and bytes are copied, never interpreted.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from pathlib import Path

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Not to block on a FIFO, nor to make a terminal our own, should the entry change after it was looked at.
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
# ASCII, because look-alikes, invisible characters and reversed text would mislead whoever reads a listing; no
# leading `-`, because a name may end up in a command line.
_NAME = re.compile(r"[A-Za-z0-9_.+=@,()][A-Za-z0-9_.+=@,() -]*")
_NAME_BYTES = 120
_SHOWN_CHARS = 200
_CHUNK = 1 << 20


class Refusal(StrEnum):
    """Why an entry was not taken."""

    SYMLINK = "symbolic link"
    HARD_LINK = "more than one hard link"
    FIFO = "named pipe"
    SOCKET = "socket"
    DEVICE = "device"
    TOO_LARGE = "larger than one file may be"
    TOO_MUCH = "over the size of all files together"
    TOO_MANY = "over the number of files"
    TOO_DEEP = "in too many folders"
    BAD_NAME = "name with other than plain characters, or too long"
    UNREADABLE = "not readable"
    VANISHED = "gone when it was opened"
    CHANGED = "changed while it was taken"


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectLimits:
    """What is taken at most from one workspace."""

    file_bytes: int = 64 << 20
    total_bytes: int = 256 << 20
    files: int = 1000
    depth: int = 16
    """Folders around a file; each holds a descriptor."""
    entries: int = 20_000
    """Looked at, of every kind; the rest is not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    path: str
    """Relative to the workspace, with `/`, in plain ASCII."""
    size: int
    """Bytes."""
    mtime_ns: int
    """As the program left it, which may be any time at all."""
    ctime_ns: int
    """When file or attributes were last changed, which no program can set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedEntry:
    path: str
    """ASCII, escaped and cut: safe in a prompt, a log and a terminal. A folder stands for all it holds."""
    reason: Refusal


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """In the order of paths, folder by folder."""

    files: tuple[FileEntry, ...]
    refused: tuple[RefusedEntry, ...]
    complete: bool
    """False when there are more entries than were looked at."""


def list_files(workspace: Path, limits: CollectLimits | None = None) -> Listing:
    """The regular files beneath `workspace`, and what else lies there with the reason it would not be taken.

    Raises:
        OSError: `workspace` itself is no folder that can be opened.
    """
    return _Walk(limits or CollectLimits(), (), None).run(workspace)


def collect(
    workspace: Path, patterns: Sequence[str], destination: Path, limits: CollectLimits | None = None
) -> Listing:
    """Copies the files whose path matches one of `patterns` into the folder `destination`, made when missing.

    Patterns are those of `fnmatch`, on the whole path: `*` goes across folders. Copies have mode 0600 and belong
    to this process. The listing holds what was copied, and all that was refused on the way.

    Raises:
        OSError: a folder cannot be opened or `destination` not written; FileExistsError when a copy is there.
    """
    destination.mkdir(mode=0o700, parents=True, exist_ok=True)
    target = os.open(destination, _FOLDER)
    try:
        return _Walk(limits or CollectLimits(), tuple(patterns), target).run(workspace)
    finally:
        os.close(target)


class _Walk:
    def __init__(self, limits: CollectLimits, patterns: tuple[str, ...], target: int | None) -> None:
        self._limits = limits
        self._patterns = patterns
        self._target = target
        """Descriptor of the folder that copies go to; None where files are only listed."""
        self._files: list[FileEntry] = []
        self._refused: list[RefusedEntry] = []
        self._bytes = 0
        self._entries_left = limits.entries
        self._complete = True

    def run(self, workspace: Path) -> Listing:
        folder = os.open(workspace, _FOLDER)
        try:
            self._enter(folder, ())
        finally:
            os.close(folder)
        return Listing(files=tuple(self._files), refused=tuple(self._refused), complete=self._complete)

    def _enter(self, folder: int, way: tuple[str, ...]) -> None:
        for name in self._names(folder):
            path = (*way, name)
            refusal = self._look_at(folder, path)
            if refusal is not None:
                self._refused.append(RefusedEntry(path=_escaped("/".join(path)), reason=refusal))

    def _names(self, folder: int) -> Iterator[str]:
        names = []
        with os.scandir(folder) as entries:
            for entry in entries:
                if self._entries_left == 0:
                    self._complete = False
                    break
                self._entries_left -= 1
                names.append(entry.name)
        yield from sorted(names)

    def _look_at(self, folder: int, path: tuple[str, ...]) -> Refusal | None:
        """Takes a file, goes into a folder; the refusal of this one entry otherwise."""
        name = path[-1]
        if len(name) > _NAME_BYTES or not _NAME.fullmatch(name):
            return Refusal.BAD_NAME
        try:
            found = os.stat(name, dir_fd=folder, follow_symlinks=False)
        except OSError as error:
            return _refusal_of(error)
        if stat.S_ISDIR(found.st_mode):
            return self._look_into(folder, path)
        return _refusal_of_kind(found) or self._take(folder, path, found)

    def _look_into(self, folder: int, path: tuple[str, ...]) -> Refusal | None:
        if len(path) > self._limits.depth:
            return Refusal.TOO_DEEP
        try:
            inner = os.open(path[-1], _FOLDER, dir_fd=folder)
        except OSError as error:
            return _refusal_of(error)
        try:
            self._enter(inner, path)
        finally:
            os.close(inner)
        return None

    def _wants(self, path: str) -> bool:
        return self._target is None or any(fnmatchcase(path, pattern) for pattern in self._patterns)

    def _over_limit(self, found: os.stat_result) -> Refusal | None:
        if found.st_size > self._limits.file_bytes:
            return Refusal.TOO_LARGE
        if self._bytes + found.st_size > self._limits.total_bytes:
            return Refusal.TOO_MUCH
        return Refusal.TOO_MANY if len(self._files) >= self._limits.files else None

    def _take(self, folder: int, path: tuple[str, ...], found: os.stat_result) -> Refusal | None:
        text = "/".join(path)
        if not self._wants(text):
            return None
        if (refusal := self._over_limit(found)) is not None:
            return refusal
        if self._target is not None:
            try:
                source = os.open(path[-1], _FILE, dir_fd=folder)
            except OSError as error:
                return _refusal_of(error)
            try:
                if _identity(os.fstat(source)) != _identity(found):
                    return Refusal.CHANGED
                if not _copy(source, self._target, path, found.st_size):
                    return Refusal.CHANGED
            finally:
                os.close(source)
        self._bytes += found.st_size
        self._files.append(
            FileEntry(path=text, size=found.st_size, mtime_ns=found.st_mtime_ns, ctime_ns=found.st_ctime_ns)
        )
        return None


def _refusal_of_kind(found: os.stat_result) -> Refusal | None:
    kind = stat.S_IFMT(found.st_mode)
    if kind == stat.S_IFREG:
        return Refusal.HARD_LINK if found.st_nlink != 1 else None
    kinds = {stat.S_IFLNK: Refusal.SYMLINK, stat.S_IFIFO: Refusal.FIFO, stat.S_IFSOCK: Refusal.SOCKET}
    return kinds.get(kind, Refusal.DEVICE)


def _refusal_of(error: OSError) -> Refusal:
    refusals = {
        errno.ENOENT: Refusal.VANISHED,
        errno.EACCES: Refusal.UNREADABLE,
        errno.EPERM: Refusal.UNREADABLE,
        # No longer the kind that was looked at: a link, no folder, a socket.
        errno.ELOOP: Refusal.CHANGED,
        errno.ENOTDIR: Refusal.CHANGED,
        errno.ENXIO: Refusal.CHANGED,
    }
    if error.errno not in refusals:
        raise error
    return refusals[error.errno]


def _identity(found: os.stat_result) -> tuple[int, ...]:
    return found.st_dev, found.st_ino, found.st_mode, found.st_nlink, found.st_size, found.st_mtime_ns


def _copy(source: int, target: int, path: tuple[str, ...], size: int) -> bool:
    """Copies to `path` beneath the folder `target`; false, with nothing left, when there are not `size` bytes."""
    folder = os.dup(target)
    try:
        for name in path[:-1]:
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, mode=0o700, dir_fd=folder)
            inner = os.open(name, _FOLDER, dir_fd=folder)
            os.close(folder)
            folder = inner
        with os.fdopen(os.open(path[-1], _NEW_FILE, 0o600, dir_fd=folder), "wb") as copy:
            left = size + 1  # one more, to notice a file that grew
            while left and (data := os.read(source, min(left, _CHUNK))):
                copy.write(data)
                left -= len(data)
        if left != 1:
            os.unlink(path[-1], dir_fd=folder)
        return left == 1
    finally:
        os.close(folder)


def _escaped(path: str) -> str:
    text = path.encode("unicode_escape").decode("ascii")
    return text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 3] + "..."
