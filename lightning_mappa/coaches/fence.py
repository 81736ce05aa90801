"""The key that makes the fences around agents' texts: unknown to them, and the same whenever a run is resumed."""

from __future__ import annotations

import re
import secrets
from pathlib import Path

from lightning_mappa.errors import CoachError, InfrastructureError
from lightning_mappa.files import write_atomically

FILE = "coach_fence.key"


def fence_key(*folders: Path) -> bytes:
    """The key of the first of the folders that holds one, else a new one; those without hold it afterwards.

    A run's own folder stands first. With the folder of replies that runs share as the second, their cases are the same
    to the byte: with keys of their own none could use what another has been told.

    Raises `CoachError` where a key cannot be read or kept, or is none.
    """
    try:
        held = {folder: _read(folder / FILE) for folder in folders}
        key = next((found for found in held.values() if found is not None), None) or secrets.token_hex(32)
        for folder, found in held.items():
            if found is None:
                write_atomically(folder / FILE, key)
    except (OSError, InfrastructureError) as error:
        raise CoachError(f"cannot keep the coach's {FILE}: {error}") from error
    return bytes.fromhex(key)


def _read(path: Path) -> str | None:
    try:
        key = path.read_text("ascii", "replace")
    except FileNotFoundError:
        return None
    if not re.fullmatch("[0-9a-f]{64}", key):
        raise CoachError(f"{path} holds no key; without it no reply that is kept beside it can be used again")
    return key
