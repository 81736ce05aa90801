"""Estimates over several samples per task, by hand, and that no figure depends on the order of arrival."""

from __future__ import annotations

import random
from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_mappa.metrics import (
    Sample,
    behaviour_metrics,
    fair_metrics,
    majority,
    mean_at_k,
    mean_scores,
    pass_at_k,
    repeated_sampling_metrics,
    samples_by_task,
    score_metrics,
    success_metrics,
)
from lightning_mappa.record import evaluation_metrics
from lightning_mappa.types import ActionStatus, ScoredEpisode, StopReason, Task, ToolCall, ToolResult, ToolStatus
from tests.unit.factories import make_action, make_scored

CALL = ToolCall(name="python", arguments={})


def played(task_id: str, sample: int, outcome: float | None, answer: str | None = None, **fields) -> ScoredEpisode:
    task = Task(id=task_id, kind=fields.pop("kind", "test"), prompt="?")
    actions = fields.pop("actions", [])
    fields |= {"task": task, "outcome": outcome, "answer": answer, "sample": sample}
    return make_scored(f"{task_id}-{sample}", actions, [None] * len(actions), **fields)


def graded(*pairs: tuple[float, str | None]) -> list[Sample]:
    return [Sample(outcome=outcome, answer=answer) for outcome, answer in pairs]


# -- single estimates -------------------------------------------------------------------------------------------


def test_pass_at_k_is_the_unbiased_estimate():
    # 1 - C(6, 4) / C(8, 4) = 1 - 15/70; the plug-in 1 - (1 - 2/8)^4 would be 0.6836
    assert pass_at_k(8, 2, 4) == pytest.approx(0.7857, abs=5e-5)
    assert pass_at_k(8, 0, 4) == 0.0
    assert pass_at_k(8, 5, 4) == 1.0
    assert pass_at_k(8, 3, 1) == pytest.approx(3 / 8)


@given(st.integers(1, 7), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_right_one(n, data):
    right, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    subsets = list(combinations([True] * right + [False] * (n - right), k))
    assert pass_at_k(n, right, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_pass_at_k_has_mean_1_minus_failures_to_the_k():
    """Unbiased: over all outcomes of four tries at p = 0.3, the mean of pass@2 is 1 - 0.7 ** 2."""
    mean = sum(
        pass_at_k(4, sum(tries), 2) * 0.3 ** sum(tries) * 0.7 ** (4 - sum(tries)) for tries in product((0, 1), repeat=4)
    )
    assert mean == pytest.approx(1 - 0.7**2)


@pytest.mark.parametrize(("n", "right", "k"), [(3, 1, 4), (3, 4, 1), (3, -1, 1), (3, 1, 0), (0, 0, 1)])
def test_pass_at_k_needs_enough_samples(n, right, k):
    with pytest.raises(ValueError, match=f"pass@{k}"):
        pass_at_k(n, right, k)


@pytest.mark.parametrize(
    ("votes", "outcome"),
    [
        ([(1.0, "7"), (0.0, "8"), (1.0, "7")], 1.0),
        ([(1.0, "7"), (0.0, "8"), (0.0, "8")], 0.0),
        ([(1.0, "7"), (0.0, "8")], 0.5),  # a tie is drawn
        ([(1.0, "7"), (0.0, "8"), (0.0, "9")], 1 / 3),
        ([(1.0, "7"), (0.0, None), (0.0, None)], 1.0),  # no answer has no vote
        ([(0.0, None), (0.0, None)], 0.0),
    ],
)
def test_the_majority(votes, outcome):
    assert majority(graded(*votes)) == pytest.approx(outcome)


def test_the_mean_weighs_every_task_the_same():
    samples = {"a": graded((1.0, "1"), (1.0, "1"), (1.0, "1"), (0.0, "2")), "b": graded((0.0, "1")), "c": []}
    assert mean_at_k(samples) == pytest.approx(0.375)  # 4 right of 5 would be 0.6
    with pytest.raises(ValueError, match="no task"):
        mean_at_k({"c": []})


def test_figures_of_four_samples():
    samples = {
        "a": graded((1.0, "1"), (1.0, "1"), (0.0, "2"), (0.0, "3")),
        "b": graded((0.0, "5"), (0.0, "5"), (1.0, "6"), (0.0, "5")),
        "c": graded((1.0, "9")),
    }
    metrics = repeated_sampling_metrics(samples, 4)
    assert metrics == pytest.approx(
        {
            "mean@4": (2 / 4 + 1 / 4 + 1) / 3,
            "pass@2": ((1 - 1 / 6) + (1 - 3 / 6)) / 2,  # c has one sample
            "pass@4": 1.0,
            "maj@4": 0.5,
            "tasks_short": 1.0,
        }
    )
    assert [name for name in repeated_sampling_metrics(samples, 3) if name.startswith("pass")] == [
        "pass@2",
        "pass@3",
    ]


def test_nothing_graded_has_no_figures_but_counts():
    metrics = success_metrics([played("a", 0, None), played("a", 1, None)])
    assert metrics == {"n": 0.0, "ungraded": 2.0}


# -- grouping ---------------------------------------------------------------------------------------------------

EPISODES = [
    *(played("a", i, float(i < 2), "1" if i < 2 else str(i), kind="x") for i in range(4)),
    *(played("b", i, float(i == 2), "6" if i == 2 else "5", kind="x") for i in range(4)),
    *(played("c", i, None if i == 3 else 1.0, "9", kind="fixture/y") for i in range(4)),
]


def test_samples_are_grouped_by_task_and_not_by_arrival():
    """Four engines answer in any order: cut into consecutive fours, the figures would be other ones."""
    reference = evaluation_metrics(EPISODES)
    assert reference["maj@4"] == pytest.approx(0.5)
    assert reference["pass@4"] == 1.0
    assert reference["success"] == pytest.approx((2 / 4 + 1 / 4 + 1) / 3)
    for seed in range(50):
        shuffled = list(EPISODES)
        random.Random(seed).shuffle(shuffled)
        assert {key: sorted(s.outcome for s in group) for key, group in samples_by_task(shuffled).items()} == {
            "a": [0.0, 0.0, 1.0, 1.0],
            "b": [0.0, 0.0, 0.0, 1.0],
            "c": [1.0, 1.0, 1.0],
        }
        assert evaluation_metrics(shuffled) == reference


def test_kinds_are_reported_and_fixtures_are_named():
    metrics = success_metrics(EPISODES)
    assert metrics["success/x"] == pytest.approx(3 / 8)
    assert metrics["success/fixture/y"] == 1.0
    assert metrics["fixture"] == pytest.approx(1 / 3)
    assert (metrics["n"], metrics["ungraded"]) == (11.0, 1.0)
    assert "fixture" not in success_metrics(EPISODES[:8])


def test_one_sample_per_task_has_no_at_k():
    metrics = success_metrics([played("a", 0, 1.0), played("b", 0, 0.0)])
    assert metrics == {"success": 0.5, "success/test": 0.5, "n": 2.0, "ungraded": 0.0}


# -- behaviour --------------------------------------------------------------------------------------------------


def test_behaviour_of_every_agent():
    ok, failed = ToolResult(status=ToolStatus.OK), ToolResult(status=ToolStatus.NONZERO)
    first = [
        make_action(agent_id="solver", response_ids=(1, 2, 3)),
        make_action(agent_id="executor", response_ids=(1, 2), tool_calls=(CALL, CALL), tool_results=(ok, failed)),
        make_action(agent_id="executor", response_ids=(1,), stop_reason=StopReason.LENGTH),
    ]
    second = [
        make_action(agent_id="solver", response_ids=(1,)),
        make_action(
            agent_id="executor",
            response_ids=(),
            status=ActionStatus.PROMPT_TOO_LONG,
            stop_reason=StopReason.NONE,
        ),
    ]
    metrics = behaviour_metrics([played("a", 0, 1.0, actions=first), played("b", 0, 1.0, actions=second)])
    assert metrics == pytest.approx(
        {
            "behaviour/solver/actions": 1.0,
            "behaviour/solver/length": 2.0,
            "behaviour/solver/truncated_rate": 0.0,
            "behaviour/solver/tool_call_rate": 0.0,
            "behaviour/executor/actions": 1.5,
            "behaviour/executor/length": 1.5,
            "behaviour/executor/truncated_rate": 0.5,
            "behaviour/executor/tool_call_rate": 1 / 3,
            "behaviour/executor/tool_ok_rate": 0.5,
        }
    )


def test_nobody_acted():
    assert behaviour_metrics([played("a", 0, None)]) == {}


def test_fair_metrics_are_means_over_those_that_have_them():
    episodes = [
        played("a", 0, 1.0, metrics={"fair/accuracy": 0.9, "accuracy": 0.9}),
        played("b", 0, 0.0, metrics={"fair/accuracy": 0.5}),
        played("c", 0, 1.0, metrics={"fair/rmse_percent": 10.0}),
        played("d", 0, None),
    ]
    expected = {"fair/accuracy": 0.7, "fair/accuracy/n": 2.0, "fair/rmse_percent": 10.0, "fair/rmse_percent/n": 1.0}
    assert fair_metrics(episodes) == pytest.approx(expected)
    assert {n: v for n, v in evaluation_metrics(episodes).items() if n in expected} == pytest.approx(expected)
    assert fair_metrics(episodes[3:]) == {}


def test_scores_of_evaluations_say_what_is_missing():
    solver, executor = make_action(), make_action(agent_id="executor", index=1)
    episodes = [make_scored("a", [solver, executor], [4.0, None]), make_scored("b", [solver, executor], [7.0, None])]
    assert mean_scores(episodes) == {"solver": 5.5}
    assert score_metrics(episodes) == {"score/solver": 5.5, "score_missing/executor": 1.0, "score_missing/solver": 0.0}
