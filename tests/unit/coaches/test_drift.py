"""A coach that prefers one kind of task by a point holds the other kind back, and the stateful correction ends that.

A team of one, as small as can be: per kind one number, the log-odds of doing right. It learns by the credit of the
package from verdicts on 16 episodes a step. In expectation a constant per kind changes no gradient; what it does is to
drown the difference between right and wrong, and to do so on one side.
"""

from __future__ import annotations

import asyncio
import math
import random
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
from omegaconf import OmegaConf

from lightning_mappa.algorithm.advantages import ActionRow, ActionStats, CreditSettings, action_advantage, credit
from lightning_mappa.coaches.base import Coach, end_batch
from lightning_mappa.coaches.stateful import CalibratedCoach
from lightning_mappa.testing import ScriptedCoach
from lightning_mappa.types import Episode, Task
from tests.unit.factories import make_action

CLASSES, NUMBERS = "tables/classification", "tables/regression"
STEPS, EPISODES, START, LR = 80, 16, 1.75, 0.05
SEEDS = range(24)
CONF = Path(__file__).parents[3] / "conf"


def plain() -> Coach:
    return ScriptedCoach(lambda shown, index: 9.0 if shown.actions[index].text == "right" else 1.0)


def leaning() -> Coach:
    def score(shown: Episode, index: int) -> float:
        return (9.0 if shown.actions[index].text == "right" else 1.0) + (shown.task.kind == NUMBERS)

    return ScriptedCoach(score)


def corrected() -> Coach:
    return CalibratedCoach(leaning(), group_by=["role", "kind"], within=["role"], min_count=8, shrinkage=1)


def packaged() -> Coach:
    """With the settings of `coach=calibrated`."""
    settings: Any = OmegaConf.to_container(OmegaConf.load(CONF / "coach" / "calibrated.yaml"))
    return CalibratedCoach(leaning(), **{key: settings[key] for key in settings if key not in ("_target_", "coach")})


class Learner:
    """Adam on the policy gradient of one number."""

    def __init__(self) -> None:
        self.log_odds, self._m, self._v, self._t = START, 0.0, 0.0, 0

    @property
    def right(self) -> float:
        return 1 / (1 + math.exp(-self.log_odds))

    def step(self, gradient: float) -> None:
        self._t += 1
        self._m = 0.9 * self._m + 0.1 * gradient
        self._v = 0.95 * self._v + 0.05 * gradient**2
        self.log_odds += LR * self._m / (1 - 0.9**self._t) / (math.sqrt(self._v / (1 - 0.95**self._t)) + 1e-8)


def failures(coach: Coach, seed: int) -> dict[str, float]:
    """Chance of doing wrong by kind, after training."""
    rng, learners = random.Random(seed), {CLASSES: Learner(), NUMBERS: Learner()}
    for step in range(STEPS):
        episodes = [_episode(f"{step}/{i}", rng, learners) for i in range(EPISODES)]

        async def judge(batch: list[Episode] = episodes) -> list[float | None]:
            return [(await coach.score(episode, 0)).score for episode in batch]

        scores = asyncio.run(judge())
        end_batch(coach)
        rows = [_row(episode, score) for episode, score in zip(episodes, scores, strict=True)]
        credits = credit(rows, CreditSettings())
        gradients = dict.fromkeys(learners, 0.0)
        for episode, row in zip(episodes, rows, strict=True):
            did_right = episode.actions[0].text == "right"
            advantage = action_advantage(credits[row.key], kl_sum=0.0, kl_coef=0.0)
            gradients[episode.task.kind] += advantage * (did_right - learners[episode.task.kind].right) / EPISODES
        for kind, learner in learners.items():
            learner.step(gradients[kind])
    return {kind: 1 - learner.right for kind, learner in learners.items()}


def _episode(name: str, rng: random.Random, learners: dict[str, Learner]) -> Episode:
    kind = rng.choice([CLASSES, NUMBERS])
    text = "right" if rng.random() < learners[kind].right else "wrong"
    action = make_action(agent_id="modeler", episode_id=name, text=text)
    task = Task(id=name, kind=kind, prompt="")
    return Episode(id=name, task=task, actions=(action,), outcome=float(text == "right"))


def _row(episode: Episode, score: float | None) -> ActionRow:
    assert score is not None
    return ActionRow(
        key=(episode.id, 0),
        agent_id="modeler",
        turn=0,
        reward=score / 10,
        masked=None,
        frozen=False,
        kl_coef=0.0,
        stats=ActionStats(n_tokens=1),
    )


@pytest.fixture(scope="module")
def gaps() -> dict[str, list[float]]:
    """Per coach and seed: how much more often classification fails than regression, as a ratio of log chances."""
    made = {"plain": plain, "leaning": leaning, "corrected": corrected, "packaged": packaged}
    found: dict[str, list[float]] = {}
    for name, make in made.items():
        ends = [failures(make(), seed) for seed in SEEDS]
        found[name] = [math.log(end[CLASSES] / end[NUMBERS]) for end in ends]
    return found


def test_a_coach_that_prefers_regression_lets_classification_fail_more(gaps):
    assert fmean(gaps["leaning"]) > 0.3
    assert t(gaps["leaning"]) > 5


@pytest.mark.parametrize("correction", ["corrected", "packaged"])
def test_without_preference_or_with_the_correction_no_kind_is_behind(gaps, correction):
    assert abs(fmean(gaps["plain"])) < 0.15
    assert abs(fmean(gaps[correction])) < 0.15
    paired = [a - b for a, b in zip(gaps["leaning"], gaps[correction], strict=True)]
    assert t(paired) > 5


def t(values):
    return fmean(values) / (stdev(values) / math.sqrt(len(values)))
