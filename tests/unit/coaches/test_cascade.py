"""Who is asked, who decides, and who is spared."""

from __future__ import annotations

import asyncio

import pytest

from lightning_mappa.coaches.cascade import CascadeCoach
from lightning_mappa.errors import ConfigError
from lightning_mappa.testing import ScriptedCoach
from tests.unit.coaches.conftest import make_episode

NAMES = ("rules", "cheap", "strong")


@pytest.mark.parametrize(
    ("scores", "decider", "score"),
    [
        pytest.param((10, 3, 5), "rules", 10, id="accepted, at the end of an interval"),
        pytest.param((0, 3, 5), "rules", 0, id="accepted"),
        pytest.param((8, 6, 1), "cheap", 6, id="not accepted, the next agrees"),
        pytest.param((8, 5.9, 1), "strong", 1, id="they disagree"),
        pytest.param((None, 6, 1), "cheap", 6, id="nothing to differ from"),
        pytest.param((8, None, 1), "strong", 1, id="no second opinion"),
        pytest.param((None, None, 4), "strong", 4, id="only the last knows"),
        pytest.param((8, 2, None), "strong", None, id="nobody settles it"),
    ],
)
def test_cascade(scores, decider, score):
    asked = []

    def coach(name, given):
        return ScriptedCoach(lambda episode, index: asked.append(name) or given, name=name)

    coaches = [coach(name, given) for name, given in zip(NAMES, scores, strict=True)]
    verdict = asyncio.run(CascadeCoach(coaches, accept=[[0, 1], [9, 10]], tolerance=2).score(make_episode(), 0))
    assert (verdict.coach, verdict.score) == (decider, score)
    assert asked == list(NAMES[: NAMES.index(decider) + 1])


def test_reason_shows_the_way():
    coaches = [ScriptedCoach(lambda e, i, s=score: s, name=name) for name, score in (("a", 2), ("b", None), ("c", 9))]
    verdict = asyncio.run(CascadeCoach(coaches).score(make_episode(), 0))
    assert verdict.reason == "after a 2, b missing: scripted"


def test_a_later_score_is_compared_with_the_last_one_given():
    coaches = [ScriptedCoach(lambda e, i, s=score: s, name=str(score)) for score in (3, None, 4, 9)]
    assert asyncio.run(CascadeCoach(coaches, tolerance=1).score(make_episode(), 0)).score == 4


def test_refused_settings():
    with pytest.raises(ConfigError, match="give a cascade 1 coach or more"):
        CascadeCoach([])
    with pytest.raises(ConfigError, match="allowed: intervals"):
        CascadeCoach([ScriptedCoach(lambda episode, index: 1.0)], accept=[[5, 2]])
