"""Batch arithmetic and the coach's bill, worked by hand."""

from __future__ import annotations

import pytest

from lightning_mappa.plan.arithmetic import (
    RunBatches,
    agent_batch,
    evaluations_of,
    longest_sequence,
    rows_per_forward,
    turns_of,
)
from lightning_mappa.plan.cost import RUBRIC_TOKENS, JudgedActions, coach_bills


def test_the_papers_mathchat():
    """32 x 2 episodes, turns 1/2/1, mini-batches of 16: 4 + 8 + 4 optimizer steps, 128 times."""
    turns = turns_of(["s", "e", "v"], {"s": 1, "e": 2, "v": 1}, ["s", "e", "v"])
    agents = {
        agent_id: agent_batch(episodes=64, turns=count, trained=True, mini_batch_size=16, ranks=2, rows_per_forward=1)
        for agent_id, count in turns.items()
    }
    run = RunBatches(prompts=32, samples_per_prompt=2, steps=128, agents=agents, evaluations=33)
    assert [one.mini_batches for one in agents.values()] == [4, 8, 4]
    assert [one.forwards_per_rank for one in agents.values()] == [8, 8, 8]
    assert (run.episodes, run.total_episodes) == (64, 8192)
    assert (run.total_actions, run.optimizer_steps) == (32_768, 2_048)


def test_turns_follow_the_order_an_agent_is_seated_in():
    assert turns_of(["a", "b", "c"], {"a": 2, "b": 1, "c": 4}, ["a", "b", "a"]) == {"a": 4, "b": 1, "c": 0}
    assert turns_of(["a", "b"], {"a": 2, "b": 1}, None) == {"a": 2, "b": 1}


@pytest.mark.parametrize(
    ("episodes", "mini", "ranks", "rows", "mini_batches", "forwards"),
    [(64, 16, 1, 16, 4, 1), (65, 16, 1, 4, 5, 4), (8, 16, 1, 4, 1, 2), (16, 16, 3, 1, 1, 6), (0, 16, 2, 1, 0, 0)],
)
def test_the_last_mini_batch_may_be_smaller_and_ranks_pad(
    episodes: int, mini: int, ranks: int, rows: int, mini_batches: int, forwards: int
):
    batch = agent_batch(
        episodes=episodes, turns=1, trained=True, mini_batch_size=mini, ranks=ranks, rows_per_forward=rows
    )
    assert (batch.actions, batch.mini_batches, batch.forwards_per_rank) == (episodes, mini_batches, forwards)


def test_a_frozen_agent_acts_and_takes_no_optimizer_step():
    batch = agent_batch(episodes=4, turns=2, trained=False, mini_batch_size=2, ranks=1, rows_per_forward=1)
    assert (batch.actions, batch.mini_batches, batch.forwards_per_rank) == (8, 0, 0)


@pytest.mark.parametrize(("steps", "interval", "expected"), [(128, 4, 33), (10, 4, 3), (2, 5, 2), (6, 3, 3)])
def test_evaluations(steps: int, interval: int, expected: int):
    assert evaluations_of(steps, interval) == expected


def test_rows_of_a_forward_hold_both_limits_and_one_sequence_always_goes():
    assert rows_per_forward(16, None, 100, 8) == 8
    assert rows_per_forward(16, 450, 100, 16) == 4
    assert rows_per_forward(16, 50, 100, 16) == 1


def test_the_longest_sequence_ends_with_the_context():
    assert longest_sequence(1000, 100, [50, 60]) == 210
    assert longest_sequence(1000, 100, [50], tool_turns=2, tokens_per_tool_output=10) == 170
    assert longest_sequence(200, 100, [50, 60]) == 200


PRICED = {
    "provider": {"model": "m"},
    "max_chars": 9_000,
    "max_tokens": 1_000,
    "guard": {
        "budget_usd": 5,
        "prices": {"m": {"input": 1.0, "cache_read": 0.0, "cache_write": 0.0, "output": 10.0}},
    },
}
TWO = (
    JudgedActions(count=100, max_new_tokens=500, with_tools=False),
    JudgedActions(count=10, max_new_tokens=50_000, with_tools=True),
)


def test_a_coach_that_asks_a_model_is_billed_for_every_action():
    """Per call 2,500 + 500 + 200 + 1,000 in, and with tools 2,500 + 3,000 + 200 + 1,000 + 1,000; 1,000 out."""
    (bill,) = coach_bills(PRICED, TWO, task_tokens=200)
    assert RUBRIC_TOKENS == 2_500
    assert (bill.calls, bill.output_tokens) == (110, 110_000)
    assert bill.input_tokens == 100 * 4_200 + 10 * 7_700
    assert bill.usd == pytest.approx(bill.input_tokens / 1e6 + 1.1)
    assert bill.budget_usd == 5


def test_coaches_around_coaches_ask_each_model_as_often_as_they_say():
    unpriced = {"provider": {"model": "n"}}
    ensemble = {"coaches": [PRICED, {"coach": unpriced}, {"_target_": "rules"}], "samples": 3}
    first, second = coach_bills(ensemble, TWO, task_tokens=200)
    assert (first.model, first.calls) == ("m", 330)
    assert (second.model, second.calls, second.usd, second.budget_usd) == ("n", 330, None, None)


def test_rules_cost_nothing():
    assert coach_bills({"_target_": "lightning_mappa.coaches.rules.RulesCoach"}, TWO, 200) == []
