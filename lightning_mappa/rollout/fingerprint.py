"""Whether an engine serves what the trainer has: both say the same after a fixed prompt, under the same version."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_mappa.errors import InfrastructureError
from lightning_mappa.seeds import derive_seed

PROMPT_TOKENS = 144
"""More than one block of a prefix cache, so that an engine which kept the old one answers from it."""
CANDIDATES = 4
TOLERANCE = {"float32": 2e-3, "float64": 2e-3, "bfloat16": 0.25}
"""Largest difference of a log-prob between trainer and engine that rounding explains, by the served dtype.

Measured: 3e-5 in float32 and 0.09 in bfloat16, SmolLM2-135M, trainer in float32.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """What the trainer's weights say of a few tokens after one prompt."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    """Of each of `token_ids` as the next token, at temperature 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedFingerprint:
    """The same, as one engine says it."""

    engine: str
    """Names the replica in messages."""
    version: int
    """Policy version that the engine itself reports."""
    log_probs: tuple[float, ...]


def probe_ids(vocab_size: int, context_length: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Prompt and candidate next tokens: arbitrary ids, the same in every call for the same arguments."""
    length = min(PROMPT_TOKENS, context_length - 1)
    ids = [derive_seed(vocab_size, "fingerprint", i) % vocab_size for i in range(length + CANDIDATES)]
    return tuple(ids[:length]), tuple(ids[length:])


def check_fingerprints(
    agent_id: str, version: int, own: Fingerprint, served: Sequence[ServedFingerprint], tolerance: float
) -> float:
    """The largest difference of a log-prob, in nats, between trainer and engines.

    Raises `InfrastructureError` when an engine reports another version, or differs by more than `tolerance`.
    """
    largest = 0.0
    for one in served:
        where = f"after the weight sync of {agent_id}, {one.engine}"
        if one.version != version:
            raise InfrastructureError(f"{where} serves version {one.version} and not {version}")
        gaps = [abs(a - b) for a, b in zip(own.log_probs, one.log_probs, strict=True)]
        gap = math.nan if any(math.isnan(g) for g in gaps) else max(gaps)
        if not gap <= tolerance:
            raise InfrastructureError(
                f"{where} differs from the trainer by {gap:.3g} nats on a fixed prompt, allowed is {tolerance:g}: "
                f"it does not serve the weights of version {version}"
            )
        largest = max(largest, gap)
    return largest
