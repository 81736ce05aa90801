"""What was measured at the end holds a score down: the table at every boundary, worked by hand."""

from __future__ import annotations

import asyncio
import math

import pytest

from lightning_mappa.coaches.caps import CLASSIFICATION, Band, CappedCoach, MetricCap, TaskMetrics
from lightning_mappa.errors import ConfigError
from lightning_mappa.testing import ScriptedCoach
from lightning_mappa.types import Episode, Task, Verdict
from tests.unit.factories import make_action


def judged(metrics, score=10.0, index=1, **settings) -> Verdict:
    """By a coach that gives `score` to the modeler (0) and the analyst (1) alike."""
    task = Task(id="t", kind="tables", prompt="?", metadata={} if metrics is None else {"metrics": metrics})
    actions = (make_action(agent_id="modeler"), make_action(agent_id="analyst", index=1))
    coach = CappedCoach(ScriptedCoach(lambda episode, index: score), **settings)
    return asyncio.run(coach.score(Episode(id="e", task=task, actions=actions), index))


SHARES = [(1.0, 9), (0.85, 9), (0.8499, 8), (0.75, 8), (0.7499, 6), (0.65, 6), (0.6499, 4), (0.55, 4), (0.5499, 3)]


@pytest.mark.parametrize(
    ("metrics", "cap"),
    [
        *[({name: value}, cap) for name in ("roc_auc", "accuracy") for value, cap in SHARES],
        ({"accuracy": 0.0}, 3),
        *[
            ({"rmse_percent": value}, cap)
            for value, cap in [(0, 9), (9.99, 9), (10, 8), (25, 8), (25.01, 6), (50, 6), (50.01, 4), (1e9, 4)]
        ],
        pytest.param({"roc_auc": 0.6, "accuracy": 0.9}, 9, id="the kinder of two metrics of one table"),
        pytest.param({"accuracy": 0.9, "rmse_percent": 30}, 6, id="the stricter of two tables"),
    ],
)
def test_table(metrics, cap):
    verdict = judged(metrics)
    assert (verdict.score, verdict.raw_score) == (cap, 10)
    assert verdict.reason.startswith(f"capped at {cap} for ")
    below = judged(metrics, score=cap - 0.5)
    assert (below.score, below.raw_score, below.reason) == (cap - 0.5, None, "scripted")
    assert judged(metrics, score=cap).raw_score is None


@pytest.mark.parametrize("metrics", [None, {}, {"f1": 0.1}, {"accuracy": math.nan}, {"rmse_percent": math.inf}])
def test_nothing_measured_caps_nothing(metrics):
    assert judged(metrics) == Verdict(score=10.0, reason="scripted", coach="scripted")


def test_missing_stays_missing():
    assert judged({"accuracy": 0.1}, score=None).score is None


def test_a_cap_is_for_the_last_agent_or_for_those_it_names():
    assert judged({"accuracy": 0.5}, index=0).score == 10
    near_random = MetricCap(metrics=("roc_auc",), bands=(Band(below=0.55, cap=5),), agents=("modeler",))
    caps = [CLASSIFICATION, near_random]
    assert [judged({"roc_auc": 0.5}, index=i, caps=caps).score for i in (0, 1)] == [5, 3]
    assert [judged({"roc_auc": 0.55}, index=i, caps=caps).score for i in (0, 1)] == [10, 4]


def test_metrics_come_from_another_key_or_from_a_function():
    task = Task(id="t", kind="k", prompt="?", metadata={"measured": {"accuracy": 0.6}})
    episode = Episode(id="e", task=task, actions=(make_action(),), outcome=0.7)
    coach = ScriptedCoach(lambda episode, index: 10.0)
    for metrics, cap in ((TaskMetrics(key="measured"), 4), (lambda episode: {"accuracy": episode.outcome}, 6)):
        assert asyncio.run(CappedCoach(coach, metrics=metrics).score(episode, 0)).score == cap


def test_raw_score_is_that_of_the_innermost_coach():
    task = Task(id="t", kind="k", prompt="?", metadata={"metrics": {"accuracy": 0.6, "x": 1}})
    episode = Episode(id="e", task=task, actions=(make_action(),))
    strict = MetricCap(metrics=("x",), bands=(Band(cap=2),))
    coach = CappedCoach(CappedCoach(ScriptedCoach(lambda episode, index: 10.0)), [strict])
    verdict = asyncio.run(coach.score(episode, 0))
    assert (verdict.score, verdict.raw_score) == (2, 10)


def test_a_cap_outside_the_scale_is_refused():
    with pytest.raises(ConfigError, match="cap of a band is 11; allowed: 0 to 10"):
        Band(cap=11)
