"""The control keeps the scores and loses what they are about."""

from __future__ import annotations

import asyncio
import random
from statistics import correlation, fmean

import pytest

from lightning_mappa.coaches.shuffled import ShuffledCoach
from lightning_mappa.testing import ScriptedCoach
from lightning_mappa.types import Verdict
from tests.unit.factories import make_action, make_scored


def verdicts_of(coach, scores: list[float | None]) -> list[Verdict]:
    async def all_of_them() -> list[Verdict]:
        episodes = [make_scored(f"e{i}", [make_action()], [score]).episode for i, score in enumerate(scores)]
        return [await coach.score(episode, 0) for episode in episodes]

    return asyncio.run(all_of_them())


def scripted(scores):
    return ScriptedCoach(lambda episode, index: scores[int(episode.id[1:])])


def test_scores_keep_their_mean_and_lose_their_action():
    draw = random.Random(1)
    scores = [float(draw.randint(0, 10)) for _ in range(3000)]
    shuffled = [v.score for v in verdicts_of(ShuffledCoach(scripted(scores), seed=3), scores)]
    assert fmean(shuffled) == pytest.approx(fmean(scores), abs=0.3)
    assert abs(correlation(scores, shuffled)) < 0.08


def test_a_missing_verdict_stays_missing():
    verdicts = verdicts_of(ShuffledCoach(scripted([5.0, None, 7.0])), [5.0, None, 7.0])
    assert verdicts[1].score is None
    assert {verdicts[0].score, verdicts[2].score} <= {5.0, 7.0}
    assert verdicts[2].raw_score == 7.0
