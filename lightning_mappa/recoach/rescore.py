"""Verdicts asked for anew on recorded episodes, and the rewards and advantages that follow from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from lightning_mappa.algorithm.advantages import ActionRow, CreditSettings, action_advantage, credit
from lightning_mappa.algorithm.rewards import action_reward
from lightning_mappa.audit.watched import halted_on_failure
from lightning_mappa.coaches.base import Coach, end_batch, shown_to, verdicts_of
from lightning_mappa.coaches.verdict import DEADLINE_S, verdict_of
from lightning_mappa.coaches.watch import MissingWatch
from lightning_mappa.datamodules.transcript import RecordedStep
from lightning_mappa.rollout.ledger import RewardSettings, masked_before_credit
from lightning_mappa.types import ActionKey, Episode, Experience, MaskReason, ScoredEpisode, Verdict


async def rescored(
    coach: Coach,
    episodes: Sequence[ScoredEpisode],
    last_agent_id: str | None,
    watch: MissingWatch | None = None,
    deadline_s: float = DEADLINE_S,
) -> tuple[ScoredEpisode, ...]:
    """The episodes of one step with the coach's verdicts; it is shown of them what a rollout would show it.

    Verdicts are asked for in the order of episodes and actions, and to the coach they are one batch. One that raises,
    or takes longer than the deadline, is missing, as in a rollout; `CoachError` and the like pass. `watch` raises one
    when too many are missing. Whatever it is that fails, calls in flight are booked first.
    """
    asked = [(scored.episode, action.index) for scored in episodes for action in scored.episode.actions]

    async def watched(episode: Episode, index: int) -> Verdict:
        verdict = await verdict_of(coach, shown_to(coach, episode, index, last_agent_id), index, deadline_s)
        if watch is not None:
            watch.see(episode.actions[index], verdict)
        return verdict

    async with halted_on_failure(coach):
        verdicts = iter(await verdicts_of([watched(episode, index) for episode, index in asked]))
    end_batch(coach)
    return tuple(replace(scored, verdicts=tuple(next(verdicts) for _ in scored.episode.actions)) for scored in episodes)


def recredited(step: RecordedStep, episodes: Sequence[ScoredEpisode], reward: RewardSettings) -> RecordedStep:
    """The step with the rewards, and the masks known before credit, that the verdicts of `episodes` give.

    KL sums, and the actions that the batch validator has refused, stay as recorded.
    """
    given = {
        (scored.episode.id, action.index): (scored, action, verdict)
        for scored in episodes
        for action, verdict in zip(scored.episode.actions, scored.verdicts, strict=True)
    }
    experiences: list[Experience] = []
    rows: list[ActionRow] = []
    for experience, row in zip(step.experiences, step.rows, strict=True):
        scored, action, verdict = given[row.key]
        value = action_reward(
            verdict.score,
            scored.episode.outcome,
            mode=reward.mode,
            process_weight=reward.process_weight,
            outcome_weight=reward.outcome_weight,
        )
        masked = masked_before_credit(action, value, reward.truncated)
        experiences.append(replace(experience, score=verdict.score, masked=masked))
        if row.masked is MaskReason.INVALID and masked in (None, MaskReason.TRUNCATED):
            masked = MaskReason.INVALID
        known = masked in (None, MaskReason.TRUNCATED)
        rows.append(replace(row, masked=masked, reward=value if known else None))
    return replace(step, experiences=tuple(experiences), rows=tuple(rows))


def advantages(step: RecordedStep, settings: CreditSettings) -> dict[ActionKey, float | None]:
    """Of every action of a trained agent, as transcripts have it; None where it is masked."""
    credits = credit(step.rows, settings, cut_episodes=step.cut_episodes)
    return {
        row.key: None if given.masked else action_advantage(given, row.stats.kl_sum, row.kl_coef)
        for row in step.rows
        if (given := credits.get(row.key)) is not None
    }


def verdicts_by_action(episodes: Sequence[ScoredEpisode]) -> Mapping[ActionKey, Verdict]:
    return {
        (scored.episode.id, action.index): verdict
        for scored in episodes
        for action, verdict in zip(scored.episode.actions, scored.verdicts, strict=True)
    }
