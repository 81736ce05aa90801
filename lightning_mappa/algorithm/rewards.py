"""From a coach's score and an episode's outcome to the reward of one action."""

from __future__ import annotations

from lightning_mappa.algorithm.choices import check_option

SCORE_RANGE = 10.0
"""Scores run from 0 to 10 and rewards from 0 to 1 for every task kind: beta means the same everywhere."""


def action_reward(
    score: float | None,
    outcome: float | None,
    *,
    mode: str,
    process_weight: float = 1.0,
    outcome_weight: float = 0.0,
) -> float | None:
    """The reward of one action before the KL penalty; None when a part it needs is missing.

    score: 0…10, outcome: 0…1. `process` is score / 10; `outcome` the episode's outcome, the same for all its
    actions; `mix` process_weight · score / 10 + outcome_weight · outcome, where a part of weight 0 is not
    needed. The other modes read no weight. Raises `ConfigError` for another mode.
    """
    check_option("algorithm.reward", mode)
    process = None if score is None else score / SCORE_RANGE
    if mode == "process":
        return process
    if mode == "outcome":
        return outcome
    reward = 0.0
    for weight, part in ((process_weight, process), (outcome_weight, outcome)):
        if weight == 0.0:
            continue
        if part is None:
            return None
        reward += weight * part
    return reward
