"""Replies kept across runs, found by what was asked."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from lightning_mappa.coaches.call_log import reply_of
from lightning_mappa.coaches.provider import CoachReply
from lightning_mappa.errors import CoachError, ConfigError, DataError, InfrastructureError
from lightning_mappa.files import read_json, write_json

CacheKey = tuple[str, int]
"""(content hash, n): the n-th reply to the same content in a run, from 0."""


class ReplyCache:
    """A folder with one file per reply, whole or not there, which several runs may share.

    Raises `ConfigError` when the folder cannot be written to.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            probe = folder / ".probe"
            probe.touch()
            probe.unlink(missing_ok=True)
        except OSError as error:
            raise ConfigError(f"cache: cannot write to {folder} ({error.strerror or error})") from error

    def reply(self, key: CacheKey) -> CoachReply | None:
        """None too for a file that something else than this class has damaged: the reply is asked for anew."""
        path = self._path(key)
        if not path.exists():
            return None
        try:
            return reply_of(read_json(path))
        except (DataError, KeyError, TypeError):
            return None

    def keep(self, key: CacheKey, reply: CoachReply) -> None:
        """Raises `CoachError` when the disk does not take it."""
        try:
            write_json(self._path(key), asdict(reply))
        except (InfrastructureError, OSError) as error:
            raise CoachError(f"cache: {error}") from error

    def _path(self, key: CacheKey) -> Path:
        content, number = key
        return self.folder / content[:2] / f"{content}-{number}.json"
