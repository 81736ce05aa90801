"""The key that makes the fences around agents' texts: unknown to them, and the same whenever a run is resumed."""

from __future__ import annotations

import os
import re
import secrets
import tempfile
from pathlib import Path

from lightning_mappa.errors import CoachError

FILE = "coach_fence.key"


def fence_key(*folders: Path) -> bytes:
    """The key of the first of the folders that holds one, else a new one; those without hold it afterwards.

    A run's own folder stands first. With the folder of replies that runs share as the second, their cases are the same
    to the byte: with keys of their own none could use what another has been told. A new key is made in the last of the
    folders, so that runs which start there together take the one that was first.

    Raises `CoachError` where a key cannot be read or kept, or is none.
    """
    try:
        held = [_read(folder / FILE) for folder in folders]
        key = next((found for found in held if found is not None), None)
        if key is None:
            key = _kept(folders[-1] / FILE, secrets.token_hex(32))
        for folder, found in zip(folders, held, strict=True):
            if found is None:
                _kept(folder / FILE, key)
    except OSError as error:
        raise CoachError(f"cannot keep the coach's {FILE}: {error}") from error
    return bytes.fromhex(key)


def _kept(path: Path, key: str) -> str:
    """Writes the key where there is none, whole or not at all and for its owner alone, and returns the one there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{FILE}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(key)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(temporary, path)  # Fails where another process was first.
        except FileExistsError:
            pass
        except OSError:  # No hard links on this file system.
            if not path.exists():
                os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)
    return _read(path) or key


def _read(path: Path) -> str | None:
    try:
        key = path.read_text("ascii", "replace")
    except FileNotFoundError:
        return None
    if not re.fullmatch("[0-9a-f]{64}", key):
        raise CoachError(f"{path} holds no key; without it no reply that is kept beside it can be used again")
    return key
