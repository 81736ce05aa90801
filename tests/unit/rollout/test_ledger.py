"""The books of a run: versions, credit, masks, and that no action is lost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_mappa.algorithm.advantages import ActionStats, CreditSettings
from lightning_mappa.errors import DataError
from lightning_mappa.rollout.ledger import Ledger, RewardSettings, StepCounts
from lightning_mappa.types import (
    Action,
    ActionStatus,
    EpisodeStatus,
    MaskReason,
    ScoredEpisode,
    StopReason,
    ToolResult,
    ToolStatus,
)
from tests.unit.factories import make_action
from tests.unit.factories import make_scored as scored


def action(episode: str, index: int, agent: str, turn: int = 0, tokens: int = 2) -> Action:
    return make_action(episode_id=episode, index=index, agent_id=agent, turn=turn, response_ids=range(3, 3 + tokens))


def stats_of(ledger: Ledger, agent: str) -> dict:
    return {
        e.key: ActionStats(n_tokens=len(e.response_ids))
        for e in ledger.experiences(0, agent)
        if e.masked in (None, MaskReason.TRUNCATED)
    }


def play_step(ledger: Ledger, episodes: list[ScoredEpisode]) -> StepCounts:
    """Opens step 0, posts, reports and syncs for every agent as a Trainer would."""
    ledger.open_step(0, episodes)
    for agent in ledger.trained_agents:
        ledger.post(0, agent, stats_of(ledger, agent), kl_coef=0.0)
    for agent in ledger.trained_agents:
        trained = sum(credit.masked is None for credit in ledger.credits_of(0, agent).values())
        ledger.report(0, agent, {"trained_actions": trained})
        ledger.record_sync(agent, 1)
    assert ledger.step_done()
    return ledger.counts()


def test_counts_add_up_with_every_kind_of_trouble_and_uneven_turns():
    cut = replace(action("e2", 0, "a"), stop_reason=StopReason.LENGTH)
    too_long = replace(action("e3", 0, "a", tokens=0), status=ActionStatus.PROMPT_TOO_LONG, stop_reason=StopReason.NONE)
    broken_tool = replace(
        action("e4", 0, "b"), tool_results=(ToolResult(status=ToolStatus.SANDBOX_ERROR, reason="gone"),)
    )
    episodes = [
        scored("e1", [action("e1", 0, "a"), action("e1", 1, "b"), action("e1", 2, "b", 1)], [7, None, 3]),
        scored("e2", [cut, action("e2", 1, "f"), action("e2", 2, "b")], [5, 5, 9]),
        scored("e3", [too_long], [None]),
        scored("e4", [broken_tool], [None]),
        scored("e5", [], [], status=EpisodeStatus.FAILED, reason="engine", outcome=None),
        scored("e6", [action("e6", 0, "a")], [1], status=EpisodeStatus.FAILED, reason="engine", outcome=None),
    ]
    ledger = Ledger({"a": True, "b": True, "f": False}, CreditSettings(), RewardSettings(truncated="mask"))
    counts = play_step(ledger, episodes)
    assert counts.produced == 9
    assert counts.masked == {
        "missing_verdict": 1,
        "truncated": 1,
        "prompt_too_long": 1,
        "tool_error": 1,
    }
    assert (counts.trained, counts.frozen, counts.queued) == (4, 1, 0)


def test_a_cut_episode_masks_its_actions_under_trajectory_scope():
    episodes = [
        scored("e1", [action("e1", 0, "a")], [1.0], status=EpisodeStatus.FAILED, reason="x", outcome=None),
        scored("e2", [action("e2", 0, "a")], [2.0]),
    ]
    ledger = Ledger({"a": True}, CreditSettings(return_scope="trajectory"), RewardSettings())
    assert play_step(ledger, episodes).masked == {"return_unknown": 1}


def test_an_action_that_the_agent_does_not_post_is_masked_as_invalid():
    ledger = Ledger({"a": True}, CreditSettings(), RewardSettings())
    ledger.open_step(0, [scored("e1", [action("e1", 0, "a"), action("e1", 1, "a", 1)], [1, 9])])
    ledger.post(0, "a", {("e1", 0): ActionStats(n_tokens=2)}, kl_coef=0.0)
    assert ledger.credits_of(0, "a")[("e1", 1)].masked is MaskReason.INVALID


def test_a_report_that_disagrees_with_the_books_stops_the_run():
    ledger = Ledger({"a": True}, CreditSettings(), RewardSettings())
    ledger.open_step(0, [scored("e1", [action("e1", 0, "a")], [1])])
    ledger.post(0, "a", stats_of(ledger, "a"), kl_coef=0.0)
    ledger.report(0, "a", {"trained_actions": 0})
    with pytest.raises(DataError, match="report 0 trained actions, the ledger has 1"):
        ledger.counts()


def test_skipped_actions_are_masked_by_name_and_still_add_up():
    ledger = Ledger({"a": True}, CreditSettings(), RewardSettings())
    ledger.open_step(0, [scored("e1", [action("e1", 0, "a"), action("e1", 1, "a", 1)], [1, 2])])
    ledger.post(0, "a", stats_of(ledger, "a"), kl_coef=0.0)
    ledger.report(0, "a", {"trained_actions": 0, "skipped_actions": 2})
    assert ledger.counts().masked == {"non_finite_step": 2}


def test_kl_of_each_agent_enters_with_its_own_coefficient():
    ledger = Ledger({"a": True, "b": True}, CreditSettings(return_scope="trajectory"), RewardSettings())
    ledger.open_step(0, [scored("e1", [action("e1", 0, "a"), action("e1", 1, "b")], [10, 10])])
    ledger.post(0, "a", {("e1", 0): ActionStats(n_tokens=2, kl_sum=1.0)}, kl_coef=0.5)
    ledger.post(0, "b", {("e1", 1): ActionStats(n_tokens=2, kl_sum=1.0)}, kl_coef=0.25)
    # r = 1 − 0.5 and 1 − 0.25
    assert ledger.credits_of(0, "a")[("e1", 0)].offset == pytest.approx(1.25)
    assert ledger.credits_of(0, "b")[("e1", 1)].offset == pytest.approx(0.75)


def test_outcome_mode_needs_no_verdict_but_an_outcome():
    ledger = Ledger({"a": True}, CreditSettings(), RewardSettings(mode="outcome"))
    episodes = [
        scored("e1", [action("e1", 0, "a")], [None], outcome=1.0),
        scored("e2", [action("e2", 0, "a")], [9.0], outcome=None),
    ]
    assert play_step(ledger, episodes).masked == {"missing_verdict": 1}


def test_an_agent_that_leaves_in_the_middle_of_a_step_does_not_hold_up_the_others():
    ledger = Ledger({"a": True, "b": True}, CreditSettings(return_scope="trajectory"), RewardSettings())
    ledger.open_step(0, [scored("e1", [action("e1", 0, "a"), action("e1", 1, "b")], [4, 6])])
    ledger.post(0, "a", stats_of(ledger, "a"), kl_coef=0.0)
    assert not ledger.posted()
    ledger.leave("b")
    assert ledger.credits_of(0, "a")[("e1", 0)].offset == pytest.approx(1.0)
    ledger.report(0, "a", {"trained_actions": 1})
    counts = ledger.counts()
    assert (counts.trained, counts.queued) == (1, 1)


def test_versions_go_up_one_by_one():
    ledger = Ledger({"a": True}, CreditSettings(), RewardSettings(), first_version=3)
    assert ledger.synced(3)
    with pytest.raises(DataError, match="from version 3 to 5"):
        ledger.record_sync("a", 5)


def test_a_lost_action_is_noticed():
    with pytest.raises(DataError, match="3 actions were produced but 2"):
        StepCounts(produced=3, trained=1, masked={"truncated": 1}, queued=0, frozen=0).check()
