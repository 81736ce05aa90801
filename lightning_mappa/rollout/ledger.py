"""The books of a run: who holds which policy version, what a step's actions are worth, and that none is lost.

A plain state machine without waits and without I/O. A runtime calls it, from one thread at a time, and does
the waiting.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lightning_mappa.algorithm.advantages import (
    ActionCredit,
    ActionRow,
    ActionStats,
    CreditSettings,
    credit,
)
from lightning_mappa.algorithm.rewards import action_reward
from lightning_mappa.errors import DataError
from lightning_mappa.types import (
    Action,
    ActionKey,
    ActionStatus,
    EpisodeStatus,
    Experience,
    MaskReason,
    ScoredEpisode,
    ToolStatus,
    Verdict,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSettings:
    """How a verdict and an outcome become an action's reward, and which actions are masked before credit."""

    mode: str = "process"
    process_weight: float = 1.0
    outcome_weight: float = 0.0
    truncated: str = "score"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCounts:
    """Where a step's actions went: produced = trained + masked + queued + frozen."""

    produced: int
    trained: int
    masked: Mapping[str, int]
    """By `MaskReason`, and `non_finite_step` for those of optimizer steps that were skipped."""
    queued: int
    """Of agents that have not reported."""
    frozen: int
    """Of agents that are not trained."""

    def check(self) -> None:
        """Raises `DataError` when an action was lost or counted twice."""
        total = self.trained + sum(self.masked.values()) + self.queued + self.frozen
        if total != self.produced:
            raise DataError(f"{self.produced} actions were produced but {total} are accounted for: {self}")


@dataclass(slots=True)
class Step:
    """One rollout batch between its arrival and the last agent's report."""

    number: int
    episodes: tuple[ScoredEpisode, ...]
    stats: dict[str, Mapping[ActionKey, ActionStats]] = field(default_factory=dict)
    kl_coef: dict[str, float] = field(default_factory=dict)
    rows: list[ActionRow] = field(default_factory=list)
    credits: dict[ActionKey, ActionCredit] | None = None
    reports: dict[str, Mapping[str, float]] = field(default_factory=dict)


def masked_before_credit(action: Action, reward: float | None, truncated: str) -> MaskReason | None:
    """Why an action cannot be trained on, as far as one sees without its neighbours."""
    if action.status is ActionStatus.PROMPT_TOO_LONG:
        return MaskReason.PROMPT_TOO_LONG
    if any(result.status is ToolStatus.SANDBOX_ERROR for result in action.tool_results):
        return MaskReason.TOOL_ERROR
    if reward is None:
        return MaskReason.MISSING_VERDICT
    if truncated == "mask" and action.truncated:
        return MaskReason.TRUNCATED
    return None


class Ledger:
    """Policy versions, the credit exchange, the step barrier and the conservation counters.

    Args:
        agents: agent id → trained (false: frozen), in the order of the workflow. Those who act with one agent's
            weights are that agent.
        first_version: completed rollout steps at the start; more than 0 after a resume.
    """

    def __init__(
        self,
        agents: Mapping[str, bool],
        credit_settings: CreditSettings,
        reward_settings: RewardSettings,
        first_version: int = 0,
    ) -> None:
        self.trained_agents = tuple(agent for agent, trained in agents.items() if trained)
        self.versions = dict.fromkeys(self.trained_agents, first_version)
        self._first = first_version
        self._frozen = frozenset(agent for agent, trained in agents.items() if not trained)
        self._credit_settings = credit_settings
        self._reward_settings = reward_settings
        self.left: set[str] = set()
        self.step: Step | None = None

    @property
    def active(self) -> tuple[str, ...]:
        """Trained agents that have not left, in workflow order."""
        return tuple(agent for agent in self.trained_agents if agent not in self.left)

    def synced(self, version: int) -> bool:
        """Whether every active agent serves `version`."""
        return all(self.versions[agent] == version for agent in self.active)

    def record_sync(self, agent_id: str, version: int) -> None:
        """Agent `agent_id` now serves `version`: one more than before, or the first one again after a resume."""
        if version != self.versions[agent_id] + 1 and not version == self.versions[agent_id] == self._first:
            raise DataError(f"agent {agent_id} went from version {self.versions[agent_id]} to {version}")
        self.versions[agent_id] = version

    def leave(self, agent_id: str) -> None:
        """The agent takes no further part; its unposted actions enter the sums like a frozen agent's."""
        self.left.add(agent_id)
        self._form_credit()

    def open_step(self, number: int, episodes: Sequence[ScoredEpisode]) -> None:
        if self.step is not None and not self.step_done():
            raise DataError(f"step {number} was opened before step {self.step.number} was done")
        self.step = Step(number=number, episodes=tuple(episodes))

    def experiences(self, number: int, agent_id: str) -> list[Experience]:
        """The agent's actions of the open step, in episode order."""
        step = self._open(number)
        return [
            Experience(
                key=(action.episode_id, action.index),
                agent_id=agent_id,
                acted_as=action.agent_id if action.weights else "",
                turn=action.turn,
                prompt_ids=action.prompt_ids,
                response_ids=action.response_ids,
                rollout_log_probs=action.rollout_log_probs,
                score=verdict.score,
                masked=self._masked(scored, action, verdict),
                truncated=action.truncated,
                policy_version=action.policy_version,
                temperature=action.temperature,
            )
            for scored, action, verdict in _actions(step.episodes)
            if action.owner == agent_id
        ]

    def post(self, number: int, agent_id: str, stats: Mapping[ActionKey, ActionStats], kl_coef: float) -> None:
        """KL sums of one agent's actions; an action left out is masked as invalid."""
        step = self._open(number)
        if agent_id in step.stats:
            raise DataError(f"agent {agent_id} posted twice in step {number}")
        step.stats[agent_id] = dict(stats)
        step.kl_coef[agent_id] = kl_coef
        self._form_credit()

    def posted(self) -> bool:
        """Whether every active agent has posted for the open step, so that credit is known."""
        return self.step is not None and all(agent in self.step.stats for agent in self.active)

    def credits_of(self, number: int, agent_id: str) -> dict[ActionKey, ActionCredit]:
        step = self._open(number)
        if step.credits is None:
            raise DataError(f"credit of step {number} was asked for before every agent had posted")
        return {
            row.key: step.credits[row.key] for row in step.rows if row.agent_id == agent_id and row.key in step.credits
        }

    def report(self, number: int, agent_id: str, metrics: Mapping[str, float]) -> None:
        self._open(number).reports[agent_id] = dict(metrics)

    def step_done(self) -> bool:
        """Every active agent has reported the open step and serves the version it made."""
        return self.step is not None and all(
            agent in self.step.reports and self.versions[agent] == self.step.number + 1 for agent in self.active
        )

    def counts(self) -> StepCounts:
        """Where the open step's actions are; agents that have not reported leave theirs queued.

        Raises `DataError` when an action is lost, or the agents report other numbers than the books have.
        """
        assert self.step is not None
        step = self.step
        trained = queued = frozen = 0
        masked: Counter[str] = Counter()
        for _, action, _ in _actions(step.episodes):
            key = (action.episode_id, action.index)
            if action.owner in self._frozen:
                frozen += 1
            elif step.credits is None or action.owner not in step.reports:
                queued += 1
            elif (reason := step.credits[key].masked) is not None:
                masked[str(reason)] += 1
            else:
                trained += 1
        skipped = sum(int(report.get("skipped_actions", 0)) for report in step.reports.values())
        if skipped:
            masked["non_finite_step"] = skipped
        produced = sum(len(scored.episode.actions) for scored in step.episodes)
        counts = StepCounts(
            produced=produced, trained=trained - skipped, masked=dict(masked), queued=queued, frozen=frozen
        )
        counts.check()
        self._compare_reports(step, counts.trained)
        return counts

    def _form_credit(self) -> None:
        step = self.step
        if step is not None and step.credits is None and self.active and self.posted():
            step.rows = self._rows(step)
            step.credits = credit(step.rows, self._credit_settings, cut_episodes=_cut_episodes(step.episodes))

    def _compare_reports(self, step: Step, trained: int) -> None:
        """What the agents say they trained on must be what the books say."""
        reported = sum(int(report["trained_actions"]) for report in step.reports.values())
        if reported != trained:
            raise DataError(f"step {step.number}: agents report {reported} trained actions, the ledger has {trained}")

    def _open(self, number: int) -> Step:
        if self.step is None or self.step.number != number:
            have = None if self.step is None else self.step.number
            raise DataError(f"step {number} was asked for while step {have} is open")
        return self.step

    def _masked(self, scored: ScoredEpisode, action: Action, verdict: Verdict) -> MaskReason | None:
        reward = self._reward(scored, verdict)
        return masked_before_credit(action, reward, self._reward_settings.truncated)

    def _reward(self, scored: ScoredEpisode, verdict: Verdict) -> float | None:
        settings = self._reward_settings
        return action_reward(
            verdict.score,
            scored.episode.outcome,
            mode=settings.mode,
            process_weight=settings.process_weight,
            outcome_weight=settings.outcome_weight,
        )

    def _rows(self, step: Step) -> list[ActionRow]:
        rows = []
        for scored, action, verdict in _actions(step.episodes):
            key = (action.episode_id, action.index)
            owner = action.owner
            gone = owner in self.left and owner not in step.stats
            frozen = owner in self._frozen or gone
            masked = self._masked(scored, action, verdict)
            stats = step.stats.get(owner, {}).get(key)
            if stats is None and not frozen and masked in (None, MaskReason.TRUNCATED):
                masked = MaskReason.INVALID
            unknown = masked not in (None, MaskReason.TRUNCATED)
            reward = None if unknown else self._reward(scored, verdict)
            rows.append(
                ActionRow(
                    key=key,
                    agent_id=owner,
                    acted_as=action.agent_id if action.weights else "",
                    turn=action.turn,
                    reward=reward,
                    masked=masked,
                    frozen=frozen,
                    kl_coef=step.kl_coef.get(owner, 0.0),
                    stats=stats or ActionStats(n_tokens=len(action.response_ids)),
                )
            )
        return rows


def _actions(episodes: Sequence[ScoredEpisode]) -> list[tuple[ScoredEpisode, Action, Verdict]]:
    return [
        (scored, action, verdict)
        for scored in episodes
        for action, verdict in zip(scored.episode.actions, scored.verdicts, strict=True)
    ]


def _cut_episodes(episodes: Sequence[ScoredEpisode]) -> frozenset[str]:
    return frozenset(scored.episode.id for scored in episodes if scored.episode.status is EpisodeStatus.FAILED)
