"""Two who share weights are one agent in returns and statistics, and have their own places in the episode."""

from __future__ import annotations

from dataclasses import replace

import pytest

from .example import advantages, example_rows, row, settings


def shared_rows(**options: float):
    """The worked example, with A and B acting with one agent's weights."""
    return [replace(one, agent_id="S", acted_as=one.agent_id) for one in example_rows(**options)]


def values(rows, chosen):
    return pytest.approx(list(advantages(rows, chosen).values()), abs=1e-6)


def test_statistics_of_an_agent_are_over_all_who_act_with_its_weights():
    """Rewards A .7 .2, B .8 .6 together: mean .575, std sqrt(.051875). C alone: mean .5, std .4."""
    rewards = {("E1", 0): ("A", 0.7), ("E1", 1): ("B", 0.8), ("E2", 0): ("A", 0.2), ("E2", 1): ("B", 0.6)}
    rows = [
        row(episode, index, "S", reward=reward, acted_as=who) for (episode, index), (who, reward) in rewards.items()
    ]
    rows = [*rows[:2], row("E1", 2, "C", reward=0.9), *rows[2:], row("E2", 2, "C", reward=0.1)]
    made = advantages(rows, settings("action", norm_scope="agent"))
    assert list(made.values()) == pytest.approx([0.548820, 0.987876, 1.0, -1.646460, 0.109764, -1.0], abs=1e-5)


def test_normalised_by_agent_the_worked_example_is_normalised_over_all():
    assert list(advantages(shared_rows(), settings(norm_scope="agent")).values()) == pytest.approx(
        [1.340557, 0.219460, -0.580820, -1.862166, 1.021343, 0.701167, 0.061135, -0.900676], abs=1e-6
    )


def test_later_actions_of_the_same_agent_are_those_of_everybody_who_shares_its_weights():
    """By hand: E1's A1 is paid for all four, 22.980; apart it would be paid for A1 and A2 alone, 11.990."""
    together = advantages(shared_rows(), settings("agent", norm_scope="agent"))
    assert list(together.values()) == values(shared_rows(), settings("trajectory", norm_scope="agent"))
    apart = advantages(example_rows(), settings("agent", norm_scope="agent"))
    assert list(apart.values()) != pytest.approx(list(together.values()), abs=0.1)


def test_the_baseline_is_that_of_a_place_in_the_episode_and_not_of_the_agent():
    """Returns 22.980 15.984 10.990 2.994 and 20.988 18.990 14.996 8.994, less 21.984 17.487 12.993 5.994 each:
    .996 −1.503 −2.003 −3 and their opposites; std sqrt(4.0657585) = 2.016372."""
    made = advantages(shared_rows(), settings(norm_scope="agent", baseline="agent_turn"))
    first = [0.493956, -0.745398, -0.993368, -1.487821]
    assert list(made.values()) == pytest.approx([*first, *(-one for one in first)], abs=1e-5)
