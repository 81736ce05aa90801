"""From verdicts to advantages. (Interface first; see `credit`.)"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_mappa.types import ActionKey, MaskReason


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionStats:
    """What a rank knows of one action, float64; s_t = sum of kl_u for u >= t within the action."""

    n_tokens: int
    kl_sum: float = 0.0
    suffix_kl_sum: float = 0.0
    """sum over t of s_t"""
    suffix_kl_sq_sum: float = 0.0
    """sum over t of s_t squared"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionRow:
    """One action of the step's batch, in episode order, as `credit` reads it."""

    key: ActionKey
    agent_id: str
    turn: int
    score: float | None
    """0…10, None when the verdict is missing."""
    reward: float | None
    """0…1 after `rewards`, None when unknown."""
    masked: MaskReason | None
    frozen: bool
    kl_coef: float
    stats: ActionStats


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionCredit:
    """Enough to write down the advantage of every token: see `token_advantages`."""

    masked: MaskReason | None
    offset: float
    """G_k less its baseline (return_level=action), or that plus beta · kl_sum (return_level=token)."""
    token_level: bool
    mean: float
    std: float
    degenerate: bool
    """The scores of the normalisation scope are constant: the advantage is 0."""
