"""A recorded step of two agents with random verdicts, as a run leaves it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from lightning_mappa.algorithm.advantages import ActionRow, ActionStats, CreditSettings, credit
from lightning_mappa.rollout.transcripts import step_path, write_transcript
from lightning_mappa.types import MaskReason, ScoredEpisode
from tests.unit.factories import make_action, make_scored
from tests.unit.in_process import VOCAB

AGENTS = ("solver", "verifier")


def make_step(step: int = 0, n: int = 24, seed: int = 0, kl: float = 0.0) -> list[ScoredEpisode]:
    """`n` episodes of one action per agent; one verdict of the first episode is missing."""
    rng = random.Random(seed + 100 * step)
    episodes = []
    for number in range(n):
        actions = [
            make_action(
                episode_id=f"train-{step}-{number:03d}",
                index=index,
                agent_id=agent_id,
                prompt_ids=(1, 2, 3),
                response_ids=[rng.randrange(4, VOCAB) for _ in range(3)],
                rollout_log_probs=(-1.5,) * 3,
            )
            for index, agent_id in enumerate(AGENTS)
        ]
        scores: list[float | None] = [float(rng.randrange(11)) for _ in AGENTS]
        if number == 0:
            scores[1] = None
        episodes.append(make_scored(actions[0].episode_id, actions, scores))
    return episodes


def write_step(folder: Path, step: int, episodes: Sequence[ScoredEpisode], settings: CreditSettings) -> None:
    rows = [
        ActionRow(
            key=(scored.episode.id, action.index),
            agent_id=action.agent_id,
            turn=0,
            reward=None if verdict.score is None else verdict.score / 10,
            masked=MaskReason.MISSING_VERDICT if verdict.score is None else None,
            frozen=False,
            kl_coef=0.01,
            stats=ActionStats(n_tokens=3),
        )
        for scored in episodes
        for action, verdict in zip(scored.episode.actions, scored.verdicts, strict=True)
    ]
    write_transcript(
        step_path(folder, step), episodes, step=step, split="train", rows=rows, credits=credit(rows, settings)
    )
