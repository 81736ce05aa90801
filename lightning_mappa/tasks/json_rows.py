"""Rows of a JSON array or of JSON lines, each with its place in the file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning_mappa.errors import ConfigError


def read_rows(path: Path, key: str) -> Iterator[tuple[str, Any]]:
    """Each row with its place: `row 3` of an array, `line 3` of JSON lines, where blank lines are skipped.

    Raises `ConfigError`, which begins with `key`, for a file that cannot be read or is no JSON.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError(f"{key}={path}: the file cannot be read ({reason})") from error
    if text.lstrip().startswith("["):
        for number, row in enumerate(_json(text, f"{key}={path}"), start=1):
            yield f"row {number}", row
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield f"line {number}", _json(line, f"{key}={path}, line {number}")


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not JSON ({error}); give a JSON array or JSON lines") from error
