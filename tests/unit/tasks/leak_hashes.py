"""Hashes of problems that are not ours to pass on: enough to compare them, and nothing to read.

python -m tests.unit.tasks.leak_hashes FOLDER     # with AIME_1983_2024.json and aime_eval_32.json in it
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from lightning_mappa.tasks.leaks import Fingerprint, fingerprint

FILE = Path(__file__).with_name("leak_hashes.npz")
SETS = ("AIME_1983_2024", "aime_eval_32")
_BITS = (1 << 32) - 1
"""Of each n-gram's hash, so that the file is small; that two of 56,000 meet by chance changes no pair."""


def load() -> dict[str, dict[str, Fingerprint]]:
    """Set → place in its file → fingerprint, n-grams by half of their hash."""
    with np.load(FILE, allow_pickle=False) as stored:
        return {name: _unpack(stored, name) for name in SETS}


def hashed(path: Path) -> dict[str, Fingerprint]:
    """The same from the file itself."""
    rows = json.loads(path.read_text(encoding="utf-8"))
    found = {}
    for place, row in enumerate(rows):
        whole = fingerprint(row["prompt"])
        found[str(place)] = Fingerprint(text=whole.text, grams=frozenset(gram & _BITS for gram in whole.grams))
    return found


def _unpack(stored: np.lib.npyio.NpzFile, name: str) -> dict[str, Fingerprint]:
    parts = np.split(stored[f"{name}_grams"], np.cumsum(stored[f"{name}_counts"])[:-1])
    texts = stored[f"{name}_texts"].tolist()
    return {
        str(place): Fingerprint(text=text, grams=frozenset(part.tolist()))
        for place, (text, part) in enumerate(zip(texts, parts, strict=True))
    }


def main() -> None:
    arrays: dict[str, np.ndarray] = {}
    for name in SETS:
        prints = list(hashed(Path(sys.argv[1]) / f"{name}.json").values())
        arrays[f"{name}_texts"] = np.array([p.text for p in prints], dtype=np.uint64)
        arrays[f"{name}_counts"] = np.array([len(p.grams) for p in prints], dtype=np.uint16)
        arrays[f"{name}_grams"] = np.array([g for p in prints for g in sorted(p.grams)], dtype=np.uint32)
    np.savez_compressed(FILE, allow_pickle=False, **arrays)


if __name__ == "__main__":
    main()
