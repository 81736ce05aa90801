"""The learning-rate factor: a function of the rollout step alone, so the same for every agent."""

from __future__ import annotations

import math


def lr_factor(step: int, *, max_steps: int, warmup_ratio: float, min_lr_ratio: float) -> float:
    """What the learning rate is multiplied by in rollout step `step` (from 0).

    Linear over the first `ceil(warmup_ratio · max_steps)` steps, the first of which is not 0 and the last of
    which is 1; then a cosine that reaches `min_lr_ratio` at `max_steps` and stays there.
    """
    warmup = math.ceil(warmup_ratio * max_steps)
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, max_steps - warmup))
    return min_lr_ratio + (1.0 - min_lr_ratio) * 0.5 * (1.0 + math.cos(math.pi * progress))
