"""Success and scores by kind of task; what was not measured is left out."""

from __future__ import annotations

from lightning_mappa.kind_metrics import kind_metrics
from lightning_mappa.types import Episode, EpisodeStatus, ScoredEpisode, Task, Verdict
from tests.unit.factories import make_action


def scored(kind, outcome, **scores):
    actions = tuple(make_action(agent_id=agent, index=index) for index, agent in enumerate(scores))
    episode = Episode(
        id=f"{kind}/{outcome}/{scores}",
        task=Task(id="t", kind=kind, prompt=""),
        actions=actions,
        outcome=outcome,
        status=EpisodeStatus.OK if outcome is not None else EpisodeStatus.FAILED,
    )
    verdicts = tuple(Verdict(score=score, reason="", coach="c") for score in scores.values())
    return ScoredEpisode(episode=episode, verdicts=verdicts)


def test_by_kind():
    episodes = [
        scored("b", 1.0, maker=8.0, user=2.0),
        scored("a", 0.0, maker=3.0, user=None),
        scored("a", 1.0, maker=6.0, user=None),
        scored("a", None, maker=9.0),
    ]
    found = kind_metrics(episodes, ("user", "maker"))
    assert found == {
        "a": {"episodes": 3, "success": 0.5, "score": {"maker": 6.0}},
        "b": {"episodes": 1, "success": 1.0, "score": {"user": 2.0, "maker": 8.0}},
    }
    assert list(found) == ["a", "b"]
    assert list(found["b"]["score"]) == ["user", "maker"]


def test_a_kind_of_which_nothing_was_graded_has_no_success():
    assert kind_metrics([scored("a", None, maker=1.0)], ("maker",)) == {"a": {"episodes": 1, "score": {"maker": 1.0}}}
    assert kind_metrics([], ("maker",)) == {}
