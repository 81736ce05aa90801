"""Intervals with values worked by hand or by a formula, and what each of them is an interval of."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from scipy import stats

from lightning_mappa.statistics.intervals import (
    Interval,
    bootstrap_mean,
    cluster_bootstrap,
    standard_errors,
    t_interval,
    wilson,
)


@pytest.mark.parametrize(
    ("right", "n", "low", "high"),
    [(59, 120, 0.40, 0.58), (12, 24, 0.31, 0.69), (16, 24, 0.47, 0.82), (7, 8, 0.53, 0.98)],
)
def test_wilson(right, n, low, high):
    found = wilson(right, n)
    assert (round(found.low, 2), round(found.high, 2)) == (low, high)
    assert found.value == right / n


def test_wilson_by_its_formula():
    z, p, n = 1.959964, 3 / 10, 10
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    found = wilson(3, 10)
    assert (found.low, found.high) == (pytest.approx(middle - half, abs=1e-6), pytest.approx(middle + half, abs=1e-6))
    assert wilson(0, 5).low == 0.0
    assert wilson(0, 5).high > 0.3


@pytest.mark.parametrize(("right", "n"), [(0, 0), (3, 2), (-1, 2)])
def test_wilson_of_nothing_is_an_error(right, n):
    with pytest.raises(ValueError, match="is no proportion"):
        wilson(right, n)


def easy_and_hard(rng: np.random.Generator, samples: int = 4) -> dict[str, list[float]]:
    """Thirty problems, half at p = .95 and half at .05."""
    chances = [0.95] * 15 + [0.05] * 15
    return {f"p{i}": list(rng.binomial(1, p, samples).astype(float)) for i, p in enumerate(chances)}


def test_three_standard_errors_answer_three_questions():
    """p(1−p)/120 gives .046; within problems .0475/120 gives .020; new problems (.2025 + .0475/4)/30 give .085."""
    rng = np.random.default_rng(0)
    drawn = [standard_errors(easy_and_hard(rng)) for _ in range(400)]
    assert np.mean([e.naive for e in drawn]) == pytest.approx(0.046, abs=0.001)
    assert math.sqrt(np.mean([e.sampling**2 for e in drawn])) == pytest.approx(0.020, abs=0.001)
    # stats.sem divides by n − 1: √(30/29) × .0845
    assert math.sqrt(np.mean([e.problems**2 for e in drawn])) == pytest.approx(0.0855, abs=0.002)


def test_sampling_error_needs_two_samples_of_every_problem():
    errors = standard_errors({"a": [1.0, 0.0], "b": [0.0]})
    assert math.isnan(errors.sampling)
    assert errors.problems == pytest.approx(0.25)
    with pytest.raises(ValueError, match="needs at least 2"):
        standard_errors({"a": [1.0], "b": []})


def test_the_bootstrap_draws_problems_and_not_samples():
    outcomes = easy_and_hard(np.random.default_rng(1))
    found = cluster_bootstrap(outcomes, seed=0)
    by_problem = (found.high - found.low) / (2 * 1.96)
    assert by_problem == pytest.approx(standard_errors(outcomes).problems, rel=0.06)
    assert by_problem > 1.7 * standard_errors(outcomes).naive
    assert found.low < found.value < found.high


def test_repeating_every_sample_narrows_nothing():
    outcomes = easy_and_hard(np.random.default_rng(2))
    repeated = {problem: samples * 10 for problem, samples in outcomes.items()}
    assert cluster_bootstrap(repeated, seed=0) == cluster_bootstrap(outcomes, seed=0)


def test_the_bootstrap_does_not_depend_on_order_and_is_seeded():
    outcomes = easy_and_hard(np.random.default_rng(3))
    shuffled = list(outcomes.items())
    random.Random(0).shuffle(shuffled)
    assert cluster_bootstrap(dict(shuffled), seed=5) == cluster_bootstrap(outcomes, seed=5)
    fractions = {str(i): [value] for i, value in enumerate(np.random.default_rng(3).uniform(0, 1, 20))}
    assert cluster_bootstrap(fractions, seed=6) != cluster_bootstrap(fractions, seed=5)


def test_the_bootstrap_of_another_figure_per_problem():
    outcomes = {"a": [1.0, 0.0], "b": [0.0, 0.0], "c": []}
    assert cluster_bootstrap(outcomes, seed=0, statistic=max).value == 0.5
    with pytest.raises(ValueError, match="no value"):
        cluster_bootstrap({"c": []}, seed=0)


def test_the_bootstrap_covers_the_truth_about_as_often_as_it_says():
    rng = np.random.default_rng(4)
    hits = 0
    for _ in range(200):
        chances = rng.uniform(0, 1, 40)
        values = rng.binomial(4, chances) / 4
        found = bootstrap_mean(values, seed=0, n_resamples=500)
        hits += found.low <= 0.5 <= found.high
    assert 0.89 < hits / 200 < 0.99


def test_t_interval_over_seeds_by_hand():
    # mean .5, standard deviation .1, three seeds: ±4.3027 × .1 / √3
    found = t_interval([0.4, 0.5, 0.6])
    assert found is not None
    assert found.value == pytest.approx(0.5)
    assert found.high - found.value == pytest.approx(4.302653 * 0.1 / math.sqrt(3), rel=1e-6)
    assert t_interval([0.4]) is None
    assert t_interval([0.2, 0.2]) == Interval(value=0.2, low=0.2, high=0.2)


def test_t_interval_covers_the_truth_with_few_seeds():
    rng = np.random.default_rng(5)
    hits = sum(not found.excludes(0.0) for found in map(t_interval, rng.normal(0, 1, (500, 3)).tolist()) if found)
    low, high = stats.binom.interval(0.999, 500, 0.95)
    assert low <= hits <= high
