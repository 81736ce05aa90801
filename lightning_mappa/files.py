"""Files that exist whole or not at all, and folders that are complete or invisible."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_mappa.errors import DataError, InfrastructureError

MANIFEST = "manifest.json"


def write_atomically(path: Path, text: str) -> None:
    """Writes to a temporary file in the same folder, syncs it and renames it over `path`.

    The same folder, because a rename across file systems is a copy and can be torn.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise InfrastructureError(f"cannot write {path}: {error.strerror or error}") from error
    _sync_folder(path.parent)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    write_atomically(path, json.dumps(value, indent=2, sort_keys=True) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """Raises `DataError` naming the file when it is missing or damaged."""
    try:
        value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {path}: {error}") from error
    return value


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def publish(temporary: Path, final: Path) -> None:
    """Turns a filled temporary folder into a verified one: sync, manifest (written last), rename, sync."""
    try:
        files = sorted(path for path in temporary.rglob("*") if path.is_file())
        entries = {
            str(path.relative_to(temporary)): {"sha256": sha256(path), "bytes": path.stat().st_size} for path in files
        }
        for path in files:
            _sync_file(path)
        write_json(temporary / MANIFEST, {"files": entries})
        if final.exists():
            shutil.rmtree(final)
        temporary.rename(final)
    except OSError as error:
        raise InfrastructureError(f"cannot write {final}: {error.strerror or error}") from error
    _sync_folder(final.parent)


def verify(folder: Path) -> str | None:
    """Why a published folder cannot be trusted; None when every byte is what the manifest says."""
    try:
        entries = read_json(folder / MANIFEST)["files"]
    except (DataError, KeyError):
        return "no readable manifest"
    for name, entry in entries.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != entry["bytes"] or sha256(path) != entry["sha256"]:
            return f"{name} is not what was written"
    return None


def _sync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_sync_folder = _sync_file
