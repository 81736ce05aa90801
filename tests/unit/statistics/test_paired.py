"""The paired gain and its interval, and when it may be called one."""

from __future__ import annotations

import random

import numpy as np
import pytest

from lightning_mappa.statistics.paired import fisher_p, holm, paired, paired_gain, permutation_p


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


# -- significance -----------------------------------------------------------------------------------------------

# Thirty problems with four samples each, 59 right before and 80 after: some problems get worse.
BEFORE = [4] * 10 + [3] * 3 + [2] * 3 + [1] * 4 + [0] * 10
AFTER = [4] * 9 + [3] + [4, 3, 2] + [4, 4, 2] + [4, 3, 2, 1] + [4, 2, 2, 1, 1, 1, 0, 0, 0, 1]


def outcomes(counts, of=4):
    return {f"p{i:02d}": [1.0] * c + [0.0] * (of - c) for i, c in enumerate(counts)}


def test_fifty_nine_to_eighty_of_a_hundred_and_twenty_is_significant():
    assert (sum(BEFORE), sum(AFTER), len(BEFORE), len(AFTER)) == (59, 80, 30, 30)
    found = paired(outcomes(BEFORE), outcomes(AFTER), seed=0)
    assert found.before == pytest.approx(59 / 120)
    assert found.after == pytest.approx(80 / 120)
    assert found.significant
    assert found.p_value < 0.01
    assert found.gain.low > 0


def test_two_points_on_thirty_problems_are_not_significant():
    before = [1] * 12 + [0] * 18
    for after in ([1] * 14 + [0] * 16, [0, 0, 0] + [1] * 14 + [0] * 13):  # none lost; three lost
        found = paired(outcomes(before, of=1), outcomes(after, of=1), seed=0)
        assert found.gain.value == pytest.approx(2 / 30)
        assert not found.significant
        assert found.gain.low <= 0
    # Two percentage points, on thirty problems with ten samples.
    before, after = [5] * 30, [5] * 26 + [8, 3, 9, 6]
    found = paired(outcomes(before, of=10), outcomes(after, of=10), seed=0)
    assert found.gain.value == pytest.approx(0.02)
    assert not found.significant


def test_the_permutation_test_is_exact_for_few_problems():
    zero = np.zeros(5)
    # All five differences point up: 2 of 2^5 sign patterns are as extreme.
    assert permutation_p(zero, np.full(5, 0.25), seed=0) == pytest.approx(2 / 32)
    # +3 −1 +1: the mean 1 is reached by 3 of 8 patterns, counted on both sides.
    assert permutation_p(np.zeros(3), np.array([3.0, -1.0, 1.0]), seed=0) == pytest.approx(6 / 8)
    assert permutation_p(zero, zero, seed=0) == 1.0


def test_problems_without_change_do_not_move_the_test():
    changed = np.array([1.0, 1.0, -1.0, 1.0, 1.0, 1.0])
    many = np.concatenate([changed, np.zeros(500)])
    assert permutation_p(np.zeros(6), changed, seed=0) == permutation_p(np.zeros(506), many, seed=0)


def test_the_sampled_test_agrees_with_the_sign_test():
    """16 of 20 equal gains up: the binomial tail P(X ≥ 16) + P(X ≤ 4) is 0.0118."""
    difference = np.array([1.0] * 16 + [-1.0] * 4)
    assert permutation_p(np.zeros(20), difference, seed=3) == pytest.approx(0.0118, abs=0.004)


def test_false_alarms_are_as_rare_as_the_level_says():
    rng = np.random.default_rng(0)
    hits = sum(permutation_p(*rng.binomial(4, 0.5, (2, 30)) / 4, seed=0, n_resamples=400) < 0.05 for _ in range(300))
    assert hits / 300 < 0.09


def test_no_figure_depends_on_the_order_of_problems():
    shuffled = list(outcomes(AFTER).items())
    random.Random(1).shuffle(shuffled)
    assert paired(outcomes(BEFORE), dict(shuffled), seed=0) == paired(outcomes(BEFORE), outcomes(AFTER), seed=0)


def test_the_record_of_a_gain():
    found = paired_gain(outcomes(BEFORE), outcomes(AFTER), seed=0)
    assert found["significant"] is True
    assert found["gain_ci"][0] < found["gain"] < found["gain_ci"][1]


@pytest.mark.parametrize(
    ("counts", "p"),
    [
        ((59, 120, 80, 120), 0.009),  # +17.5 points
        ((29, 120, 35, 120), 0.47),  # +5.0
        ((100, 128, 110, 128), 0.14),  # +7.8
        ((93, 128, 98, 128), 0.57),  # +3.9
        ((12, 24, 16, 24), 0.38),
    ],
)
def test_published_counts_by_fisher(counts, p):
    assert fisher_p(*counts) == pytest.approx(p, abs=0.006)


# -- several tests ----------------------------------------------------------------------------------------------


def test_holm_by_hand():
    # sorted .005 .01 .03 .04: 4×.005=.02, 3×.01=.03, 2×.03=.06, 1×.04 → not below the one before: .06
    p = {"c": 0.03, "a": 0.01, "d": 0.04, "b": 0.005}
    assert holm(p) == pytest.approx({"c": 0.06, "a": 0.03, "d": 0.06, "b": 0.02})
    assert list(holm(p)) == list(p)
    assert holm({"a": 0.7, "b": 0.9}) == {"a": 1.0, "b": 1.0}
    assert holm({"a": 0.04}) == {"a": 0.04}
    assert holm({}) == {}
