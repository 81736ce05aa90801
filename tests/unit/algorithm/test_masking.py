"""What a missing verdict, a cut episode, a frozen agent or a masked action does to the others."""

from dataclasses import replace

import pytest

from lightning_mappa.algorithm.advantages import credit
from lightning_mappa.types import MaskReason

from .example import PLACES, advantages, example_rows, per_token, row, settings

SCOPES = ("trajectory", "agent", "action")


def episode(rewards, name="E", **changes):
    return [
        row(name, k, agent, turn, reward, **changes)
        for k, ((agent, turn), reward) in enumerate(zip(PLACES, rewards, strict=False))
    ]


def masks(rows, scope, **options):
    return [item.masked for item in credit(rows, settings(scope), **options).values()]


UNKNOWN, MISSING = MaskReason.RETURN_UNKNOWN, MaskReason.MISSING_VERDICT


@pytest.mark.parametrize(
    ("scope", "expected"),
    [
        ("trajectory", [UNKNOWN, UNKNOWN, MISSING, None]),
        ("agent", [None, None, MISSING, None]),
        ("action", [None, None, MISSING, None]),
    ],
)
def test_missing_verdict_masks_the_earlier_returns_that_contain_it(scope, expected):
    assert masks(episode([0.7, 0.5, None, 0.3]), scope) == expected


def test_agent_scope_masks_the_same_agents_earlier_action():
    assert masks(episode([0.7, 0.5, 0.8, None]), "agent") == [None, None, UNKNOWN, MISSING]


@pytest.mark.parametrize("reason", [MaskReason.PROMPT_TOO_LONG, MaskReason.TOOL_ERROR, MaskReason.INVALID, MISSING])
def test_every_reason_without_a_reward_masks_earlier_actions(reason):
    rows = episode([0.7, 0.5, None, 0.3])
    rows[2] = replace(rows[2], masked=reason)
    assert masks(rows, "trajectory") == [UNKNOWN, UNKNOWN, reason, None]


def test_truncated_action_keeps_its_reward_in_earlier_returns_and_leaves_the_statistics():
    rows = example_rows()
    rows[1] = replace(rows[1], masked=MaskReason.TRUNCATED)
    made = credit(rows, settings())
    assert made["E1", 1].masked is MaskReason.TRUNCATED
    assert made["E1", 0].offset == pytest.approx(22.980, abs=1e-12)
    assert made["E1", 0].mean == pytest.approx((116.916 - 15.984) / 7, abs=1e-12)
    assert per_token(made["E1", 1], [0.2, -0.1, 0.5]) == [0.0, 0.0, 0.0]


def test_an_action_keeps_its_own_reason_when_its_return_is_unknown_too():
    rows = episode([0.7, 0.5, None, 0.3])
    rows[0] = replace(rows[0], masked=MaskReason.TRUNCATED)
    assert masks(rows, "trajectory") == [MaskReason.TRUNCATED, UNKNOWN, MISSING, None]


@pytest.mark.parametrize(("scope", "expected"), [("trajectory", UNKNOWN), ("agent", UNKNOWN), ("action", None)])
def test_cut_episode_counts_as_a_missing_verdict_at_its_end(scope, expected):
    rows = episode([0.7, 0.5], "cut") + episode([0.4, 0.9, 0.1, 0.2], "whole")
    made = masks(rows, scope, cut_episodes={"cut", "never acted"})
    assert made == [expected] * 2 + [None] * 4


def test_cut_episode_leaves_the_other_reasons_alone():
    rows = episode([0.7, None, 0.5])
    rows[2] = replace(rows[2], masked=MaskReason.TRUNCATED)
    made = masks(rows, "trajectory", cut_episodes=["E"])
    assert made == [UNKNOWN, MISSING, MaskReason.TRUNCATED]


@pytest.mark.parametrize("scope", SCOPES)
def test_masked_actions_count_nowhere(scope):
    kept = episode([0.7, 0.5, 0.8, 0.3], "E1")
    alone = credit(kept, settings(scope, "token", baseline="agent_turn"))
    extra = episode([0.9, 0.1, None, None], "E2", masked=None)
    extra = [replace(item, masked=item.masked or MaskReason.INVALID, reward=None) for item in extra]
    both = credit(kept + extra, settings(scope, "token", baseline="agent_turn"))
    assert {key: both[key] for key in alone} == alone


def test_dropping_one_action_of_the_example_recomputes_the_statistics():
    rows = example_rows()
    rows[7] = replace(rows[7], reward=None)
    made = credit(rows, settings("action"))
    expected = [6.996, 4.994, 7.996, 2.994, 1.998, 3.994, 6.002]
    assert made["E1", 0].mean == pytest.approx(sum(expected) / 7, abs=1e-12)
    assert made["E2", 3].masked is MISSING


def test_frozen_agents_enter_sums_without_kl_and_get_no_credit():
    rows = [replace(item, frozen=item.agent_id == "B") for item in example_rows()]
    made = credit(rows, settings())
    assert list(made) == [("E1", 0), ("E1", 1), ("E2", 0), ("E2", 1)]
    # 6.996 + 4.994 + 8 + 3, and so on: B's scores without B's KL
    assert [item.offset for item in made.values()] == pytest.approx([22.990, 15.994, 20.992, 18.994], abs=1e-12)
    assert made["E1", 0].mean == pytest.approx((22.990 + 15.994 + 20.992 + 18.994) / 4, abs=1e-12)


def test_frozen_action_without_a_reward_masks_earlier_ones():
    rows = [replace(item, frozen=item.agent_id == "B") for item in episode([0.7, 0.5, None, 0.3])]
    assert masks(rows, "trajectory") == [UNKNOWN, UNKNOWN]
    assert masks(rows, "agent") == [None, None]


def test_frozen_actions_count_in_the_mean_over_the_scope():
    rows = [replace(item, frozen=item.agent_id == "B") for item in episode([0.9, 0.5, 0.3, 0.1])]
    made = credit(rows, settings(return_agg="mean"))
    assert made["E", 0].offset == pytest.approx(1.8 / 4)
    assert made["E", 1].offset == pytest.approx(0.9 / 3)


def test_each_action_is_charged_with_its_own_agents_coefficient():
    rows = [replace(item, kl_coef=0.5 if item.agent_id == "B" else 0.0) for item in example_rows()]
    made = credit(rows, settings())
    # E1: A's r are the scores, B's are 8 − 0.5 · 0.4 and 3 − 0.5 · 0.6
    assert made["E1", 0].offset == pytest.approx(7 + 5 + 7.8 + 2.7, abs=1e-12)


def test_batch_without_a_usable_action():
    rows = episode([None, None])
    made = credit(rows, settings())
    assert [item.masked for item in made.values()] == [MISSING, MISSING]
    assert not any(item.degenerate for item in made.values())
    assert advantages(rows, settings()) == {("E", 0): 0.0, ("E", 1): 0.0}
    assert credit([], settings()) == {}


def test_every_trained_action_is_credited_once_in_order():
    rows = example_rows() + episode([None, 0.5, 0.4], "E3")
    assert list(credit(rows, settings(), cut_episodes=["E3"])) == [item.key for item in rows]


def test_episodes_in_pieces_or_out_of_order_are_refused():
    a, b = episode([0.7, 0.5], "E1"), episode([0.4], "E2")
    with pytest.raises(ValueError, match="episode E1"):
        credit([a[0], *b, a[1]], settings())
    with pytest.raises(ValueError, match="episode E1"):
        credit([a[1], a[0]], settings())
