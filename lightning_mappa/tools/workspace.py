"""The one folder that an episode's programs may write to."""

from __future__ import annotations

import fcntl
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger(__name__)

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_PREFIX = "mappa-workspace-"
_MAX_DEPTH = 64
"""Of folders that are counted; each level holds a descriptor."""


class Workspaces:
    """Makes a private folder per episode. What one agent leaves there, the next one finds.

    They lie under the system's temporary folder by default and not in the run folder, whose path would lead a
    program to answers and weights.
    """

    def __init__(self, root: str | Path | None = None) -> None:
        self._root = None if root is None else Path(root)
        self._swept = False

    @contextmanager
    def open(self) -> Iterator[Path]:
        """A new empty folder, mode 0700 under an unguessable name, removed with all it holds on leaving.

        The first call also removes what killed runs have left behind.
        """
        if not self._swept:
            self._swept = True
            sweep_stale(Path(tempfile.gettempdir()) if self._root is None else self._root)
        path, lock = self._make()
        try:
            yield path
        finally:
            try:
                remove_tree(path)
            except OSError as error:
                logger.warning("Workspace %s could not be removed: %s", path, error)
            finally:
                os.close(lock)

    def _make(self) -> tuple[Path, int]:
        """A folder and the descriptor that holds its lock for as long as this process lives."""
        while True:
            path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=self._root))
            try:
                lock = os.open(path, _FOLDER)
            except FileNotFoundError:
                continue  # swept before it was locked
            fcntl.flock(lock, fcntl.LOCK_EX)
            if os.fstat(lock).st_nlink:
                return path, lock
            os.close(lock)


def sweep_stale(root: Path) -> None:
    """Removes the workspaces in `root` whose process is dead, which nobody holds a lock on."""
    for entry in root.glob(f"{_PREFIX}*"):
        try:
            folder = os.open(entry, _FOLDER)
        except OSError:  # another user's, or gone
            continue
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove_tree(entry)
        except BlockingIOError:
            continue
        except OSError as error:
            logger.warning("Stale workspace %s could not be removed: %s", entry, error)
        finally:
            os.close(folder)


def remove_tree(path: Path) -> None:
    """Removes a folder whose programs are dead, however they left it: without permissions, or nested deeper than
    a path or the stack can be. Links are removed, never followed.

    Raises:
        OSError: something in it belongs to another user.
    """
    folder = os.open(path, _FOLDER)
    way: list[str] = []
    try:
        os.fchmod(folder, 0o700)
        while True:
            if (name := _clear_to_subfolder(folder)) is not None:
                os.chmod(name, 0o700, dir_fd=folder)
                folder = _step(folder, name)
                way.append(name)
            elif way:
                folder = _step(folder, "..")
                os.rmdir(way.pop(), dir_fd=folder)
            else:
                break
    finally:
        os.close(folder)
    os.rmdir(path)


def _clear_to_subfolder(folder: int) -> str | None:
    """Removes entries until one is a folder, whose name it returns; None when nothing is left."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                return entry.name
            os.unlink(entry.name, dir_fd=folder)
    return None


def _step(folder: int, name: str) -> int:
    """One descriptor at a time, so that no depth is too much."""
    following = os.open(name, _FOLDER, dir_fd=folder)
    os.close(folder)
    return following


def exceeds(path: Path, *, max_bytes: int, max_files: int) -> bool:
    """Whether the tree takes up more bytes of disk or more entries than that, or is nested too deep to count.

    Programs may be at work in it; stops counting at the limit; folders it may not read count as empty.
    """
    used_bytes = used_files = 0
    stack = [os.open(path, _FOLDER)]
    iterators = [os.scandir(stack[0])]
    try:
        while iterators:
            entry = next(iterators[-1], None)
            if entry is None:
                iterators.pop().close()
                os.close(stack.pop())
                continue
            try:
                used_bytes += entry.stat(follow_symlinks=False).st_blocks * 512
                if entry.is_dir(follow_symlinks=False):
                    stack.append(os.open(entry.name, _FOLDER, dir_fd=stack[-1]))
                    iterators.append(os.scandir(stack[-1]))
            except (FileNotFoundError, PermissionError, NotADirectoryError):
                pass
            used_files += 1
            if used_bytes > max_bytes or used_files > max_files or len(stack) > _MAX_DEPTH:
                return True
        return False
    finally:
        for iterator in iterators:
            iterator.close()
        for descriptor in stack:
            os.close(descriptor)
