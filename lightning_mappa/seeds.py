"""One seed for every random choice, derived from what the choice is about."""

from __future__ import annotations

import hashlib
import json


def derive_seed(*parts: str | int) -> int:
    """A seed in 0 … 2^53 − 1 (exact as a JSON number), the same on every machine and in every process.

    Parts are told apart by position and type: `("1", 2)`, `(1, 2)` and `("12",)` give unrelated seeds.
    """
    digest = hashlib.sha256(json.dumps(parts).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 11
