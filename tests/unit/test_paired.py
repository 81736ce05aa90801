"""The paired gain and its interval."""

from __future__ import annotations

import pytest

from lightning_mappa.paired import paired_gain


def test_gain_is_paired_by_problem_and_not_by_arrival():
    initial = {"a": [0.0, 1.0], "b": [0.0], "c": [1.0], "d": [0.0]}
    selected = {"d": [1.0], "c": [1.0], "b": [1.0], "a": [1.0, 1.0]}
    result = paired_gain(initial, selected, seed=0)
    # per problem: +0.5, +1, 0, +1
    assert result["n"] == 4
    assert result["initial"] == pytest.approx(0.375)
    assert result["selected"] == pytest.approx(1.0)
    assert result["gain"] == pytest.approx(0.625)
    low, high = result["gain_ci"]
    assert 0.0 <= low < 0.625 < high <= 1.0


def test_interval_agrees_with_the_normal_one_on_many_problems():
    # 400 problems, 100 won and none lost: mean .25, standard error sqrt(.25 · .75 / 400) = .02165
    initial = {str(i): [0.0] for i in range(400)}
    selected = {str(i): [1.0 if i < 100 else 0.0] for i in range(400)}
    low, high = paired_gain(initial, selected, seed=1)["gain_ci"]
    assert low == pytest.approx(0.25 - 1.96 * 0.02165, abs=0.006)
    assert high == pytest.approx(0.25 + 1.96 * 0.02165, abs=0.006)


def test_no_difference_has_an_interval_of_zero_width():
    outcomes = {"a": [1.0], "b": [0.0]}
    assert paired_gain(outcomes, outcomes, seed=0)["gain_ci"] == [0.0, 0.0]


def test_ungraded_problems_are_left_out_on_both_sides_and_counted():
    result = paired_gain({"a": [0.0], "b": []}, {"a": [1.0], "b": [1.0]}, seed=0)
    assert (result["n"], result["n_ungraded"], result["selected"]) == (1, 1, 1.0)


def test_different_problems_cannot_be_paired():
    with pytest.raises(ValueError, match="different problems"):
        paired_gain({"a": [0.0]}, {"b": [1.0]}, seed=0)
