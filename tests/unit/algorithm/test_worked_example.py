"""The table of the algorithm's definition, line by line."""

import pytest

from lightning_mappa.algorithm.advantages import credit
from lightning_mappa.algorithm.rewards import action_reward

from .example import EXAMPLE_KLS, SCORES, advantages, example_rows, per_token, settings


def test_trajectory_returns():
    offsets = [item.offset for item in credit(example_rows(), settings()).values()]
    assert offsets == pytest.approx([22.980, 15.984, 10.990, 2.994, 20.988, 18.990, 14.996, 8.994], abs=1e-12)


def test_penalised_rewards_are_the_returns_of_action_scope():
    offsets = [item.offset for item in credit(example_rows(), settings("action")).values()]
    assert offsets == pytest.approx([6.996, 4.994, 7.996, 2.994, 1.998, 3.994, 6.002, 8.994], abs=1e-12)


def test_trajectory_normalised_per_action():
    made = credit(example_rows(), settings())
    assert {(item.mean, item.std) for item in made.values()} == {(made["E1", 0].mean, made["E1", 0].std)}
    assert made["E1", 0].mean == pytest.approx(14.6145, abs=1e-12)
    assert made["E1", 0].std == pytest.approx(6.240315, abs=5e-7)
    values = list(advantages(example_rows(), settings()).values())
    assert values == pytest.approx(
        [1.340557, 0.219460, -0.580820, -1.862166, 1.021343, 0.701167, 0.061135, -0.900676], abs=5e-7
    )
    assert sum(values) == pytest.approx(0.0, abs=1e-12)


def test_trajectory_normalised_per_token():
    made = credit(example_rows(), settings(unit="token"))
    assert made["E1", 0].mean == pytest.approx(15.17625, abs=1e-12)
    assert made["E1", 0].std == pytest.approx(6.253766, abs=5e-7)
    assert list(advantages(example_rows(), settings(unit="token")).values()) == pytest.approx(
        [1.247848, 0.129162, -0.669397, -1.947986, 0.929320, 0.609833, -0.028823, -0.988564], abs=5e-7
    )


def test_token_level_returns():
    made = credit(example_rows(), settings(unit="token", return_level="token"))
    mean, std = made["E1", 0].mean, made["E1", 0].std
    assert mean == pytest.approx(15.177312, abs=5e-7)
    assert std == pytest.approx(6.253884, abs=5e-7)
    tokens = [value for key, kls in EXAMPLE_KLS.items() for value in per_token(made[key], kls)]
    returns = [value * (std + 1e-8) + mean for value in tokens]
    first = [22.980, 22.981, 15.984, 15.986, 15.985, 10.990, 2.994, 2.994]
    second = [20.988, 20.989, 18.990, 18.993, 18.994, 14.996, 8.994, 8.999]
    assert returns == pytest.approx(first + second, abs=1e-12)
    assert tokens[0] == pytest.approx(1.247655, abs=5e-7)
    assert tokens[-1] == pytest.approx(-0.987916, abs=5e-7)


def test_divided_by_ten():
    rewards = [action_reward(score, None, mode="process") for scores in SCORES for score in scores]
    rows = example_rows(divide=10)
    assert [row.reward for row in rows] == rewards
    made = credit(rows, settings())
    assert made["E1", 0].mean == pytest.approx(1.452, abs=1e-12)
    assert made["E1", 0].std == pytest.approx(0.620952, abs=5e-7)
    assert list(advantages(rows, settings()).values()) == pytest.approx(
        [1.333435, 0.212577, -0.582975, -1.864877, 1.024233, 0.705368, 0.070859, -0.898619], abs=5e-7
    )


def test_action_scope_normalised_per_action():
    assert list(advantages(example_rows(), settings("action")).values()) == pytest.approx(
        [0.654684, -0.219101, 1.091141, -1.092014, -1.526724, -0.655557, 0.220847, 1.526724], abs=5e-7
    )


def test_agent_scope_sums_over_later_actions_of_the_same_agent():
    offsets = [item.offset for item in credit(example_rows(), settings("agent")).values()]
    assert offsets == pytest.approx([11.990, 4.994, 10.990, 2.994, 5.992, 3.994, 14.996, 8.994], abs=1e-12)


def test_mean_divides_by_the_actions_in_scope():
    offsets = [item.offset for item in credit(example_rows(), settings(return_agg="mean")).values()]
    sums = [22.980, 15.984, 10.990, 2.994, 20.988, 18.990, 14.996, 8.994]
    assert offsets == pytest.approx([g / n for g, n in zip(sums, [4, 3, 2, 1] * 2, strict=True)], abs=1e-12)


def test_agent_turn_baseline():
    made = credit(example_rows(), settings(baseline="agent_turn"))
    # half of the gap between the two episodes' returns at each place, with either sign
    assert [made["E1", k].offset for k in range(4)] == pytest.approx([0.996, -1.503, -2.003, -3.0], abs=1e-12)
    assert [made["E2", k].offset for k in range(4)] == pytest.approx([-0.996, 1.503, 2.003, 3.0], abs=1e-12)


def test_statistics_per_agent():
    made = credit(example_rows(), settings("action", norm_scope="agent"))
    assert made["E1", 0].mean == pytest.approx((6.996 + 4.994 + 1.998 + 3.994) / 4, abs=1e-12)
    assert made["E2", 3].mean == pytest.approx((7.996 + 2.994 + 6.002 + 8.994) / 4, abs=1e-12)
    assert made["E1", 0].std != made["E1", 2].std


def test_paper_and_reference_code_settings():
    rows = example_rows(divide=10)
    paper = credit(rows, settings("trajectory", "token", return_level="token"))
    assert paper["E1", 0].mean == paper["E2", 3].mean
    code = credit(rows, settings("action", "token", return_level="token", norm_scope="agent"))
    # A's tokens, E1 then E2: reward − beta · s_t
    tokens_A = [0.696, 0.697, 0.494, 0.496, 0.495, 0.198, 0.199, 0.394, 0.397, 0.398]
    assert code["E1", 0].mean == pytest.approx(sum(tokens_A) / 10, abs=1e-12)
    assert code["E1", 0].mean != pytest.approx(code["E1", 2].mean)
