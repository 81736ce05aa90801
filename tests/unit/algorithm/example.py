"""The worked example: agents A and B with two turns each, two episodes; and short ways to write batches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from lightning_mappa.algorithm.advantages import (
    ActionCredit,
    ActionRow,
    ActionStats,
    CreditSettings,
    action_advantage,
    action_stats,
    credit,
    suffix_kl,
    token_advantages,
)
from lightning_mappa.types import ActionKey

BETA = 0.01
PLACES = (("A", 0), ("A", 1), ("B", 0), ("B", 1))
SCORES = ((7.0, 5.0, 8.0, 3.0), (2.0, 4.0, 6.0, 9.0))
KLS = (
    ((0.10, 0.30), (0.20, -0.10, 0.50), (0.40,), (0.00, 0.60)),
    ((0.10, 0.10), (0.30, 0.10, 0.20), (-0.20,), (0.50, 0.10)),
)


def stats_of(kls: Sequence[float]) -> ActionStats:
    kl_BT = torch.tensor([kls], dtype=torch.float64)
    return action_stats(kl_BT, torch.ones_like(kl_BT, dtype=torch.bool))[0]


def row(
    episode: str,
    index: int,
    agent_id: str = "A",
    turn: int = 0,
    reward: float | None = 0.5,
    kls: Sequence[float] = (0.0,),
    **changes,
) -> ActionRow:
    made = ActionRow(
        key=(episode, index),
        agent_id=agent_id,
        turn=turn,
        reward=reward,
        masked=None,
        frozen=False,
        kl_coef=BETA,
        stats=stats_of(kls),
    )
    return replace(made, **changes)


def example_rows(*, divide: float = 1.0) -> list[ActionRow]:
    return [
        row(episode, index, agent, turn, score / divide, kls)
        for episode, scores, all_kls in zip(("E1", "E2"), SCORES, KLS, strict=True)
        for index, ((agent, turn), score, kls) in enumerate(zip(PLACES, scores, all_kls, strict=True))
    ]


EXAMPLE_KLS = dict(zip([row.key for row in example_rows()], [k for e in KLS for k in e], strict=True))


def settings(scope: str = "trajectory", unit: str = "action", **more) -> CreditSettings:
    return CreditSettings(return_scope=scope, norm_unit=unit, **{"norm_scope": "all", **more})


def advantages(rows: Sequence[ActionRow], chosen: CreditSettings, **options) -> dict[ActionKey, float]:
    """The action-level advantage of every credited action."""
    by_key = {item.key: item for item in rows}
    return {
        key: action_advantage(made, by_key[key].stats.kl_sum, by_key[key].kl_coef)
        for key, made in credit(rows, chosen, **options).items()
    }


def per_token(made: ActionCredit, kls: Iterable[float], beta: float = BETA) -> list[float]:
    kl_BT = torch.tensor([list(kls)], dtype=torch.float64)
    return token_advantages(made, suffix_kl(kl_BT, torch.ones_like(kl_BT).bool())[0], beta).tolist()
