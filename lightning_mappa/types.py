"""The values that flow through a run.

    Task ─ Workflow.run ─▶ Episode[Action…] ─ Coach.score ─▶ ScoredEpisode ─ split by agent ─▶ Experience…
         ─ collate ─▶ ExperienceBatch ─ AgentModule ─▶ update

All but `ExperienceBatch` are frozen plain values: picklable, JSON-able (`dataclasses.asdict`), no torch.
Axes in names: B sequences, T tokens of prompt and response together, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from lightning_mappa.tools.changes import FileChange


class ActionStatus(StrEnum):
    """What became of one generation call; only `ok` and `no_code` have something to train on."""

    OK = "ok"
    NO_CODE = "no_code"
    """The agent has a tool, has not used it in this episode, and its text holds no fenced python block."""
    PROMPT_TOO_LONG = "prompt_too_long"
    """Prompt plus `max_new_tokens` do not fit the context: nothing was generated."""


class StopReason(StrEnum):
    STOP = "stop"
    """The end-of-turn token was sampled; it is the last of `response_ids`."""
    LENGTH = "length"
    """Cut at `max_new_tokens`: the action counts as truncated."""
    NONE = "none"
    """Nothing was generated."""


class ToolStatus(StrEnum):
    OK = "ok"
    NONZERO = "nonzero"
    TIMEOUT = "timeout"
    MEMORY = "memory"
    OUTPUT_LIMIT = "output_limit"
    DISK_LIMIT = "disk_limit"
    PROCESS_LIMIT = "process_limit"
    SIGNAL = "signal"
    SANDBOX_ERROR = "sandbox_error"
    """Ours, not the program's: the action is masked, never scored."""


class EpisodeStatus(StrEnum):
    OK = "ok"
    FAILED = "failed"
    """Cut short by an error or the deadline; `reason` says which. A verdict is missing at the episode's end."""
    RUNNING = "running"
    """In progress, as a coach is shown it that judges an action before the end. No finished episode has it."""


class MaskReason(StrEnum):
    """Why an action is kept out of loss and statistics."""

    MISSING_VERDICT = "missing_verdict"
    RETURN_UNKNOWN = "return_unknown"
    """A later action in the scope of its return has no verdict."""
    TRUNCATED = "truncated"
    PROMPT_TOO_LONG = "prompt_too_long"
    TOOL_ERROR = "tool_error"
    INVALID = "invalid"
    """Refused by the batch validator: non-finite log-prob, id outside the vocabulary, empty response."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    id: str
    kind: str
    """Task family, the key of per-kind statistics (`arithmetic/2`, `math`)."""
    prompt: str
    reference: str | None = None
    """The right answer; never shown to agents."""
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    status: ToolStatus
    stdout: str = ""
    """Head and tail when long, with a line that counts what was left out."""
    stderr: str = ""
    exit_code: int | None = None
    wall_s: float = 0.0
    reason: str = ""
    tier: str = ""
    """The isolation it ran under; `none` for a plain process."""
    files: tuple[FileChange, ...] = ()
    """What the program did to the workspace, in the order of paths."""

    @property
    def ok(self) -> bool:
        return self.status is ToolStatus.OK


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One generation call by one agent and what its tools returned: the unit the coach scores.

    `prompt_ids + response_ids` is exactly what the engine saw and sampled, and exactly what is trained on.
    """

    episode_id: str
    index: int
    """Position in the episode, over all agents, from 0."""
    agent_id: str
    """Who acted: a key of the config's `agents`."""
    role: str
    turn: int
    """This agent's turn in the episode, from 0."""
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    rollout_log_probs: tuple[float, ...]
    """One per response id, float32, at the sampling temperature, from the engine that sampled."""
    prompt_text: str
    """What the agent was asked in this turn (the last message), for coach and transcripts."""
    text: str
    """The response decoded without special tokens."""
    status: ActionStatus
    stop_reason: StopReason
    tool_calls: tuple[ToolCall, ...] = ()
    tool_results: tuple[ToolResult, ...] = ()
    policy_version: int = 0
    """Completed rollout steps contained in the weights that sampled it."""
    temperature: float = 1.0
    seed: int = 0
    weights: str | None = None
    """The agent whose weights it acted with, where several share them; None: its own."""

    @property
    def owner(self) -> str:
        """The agent that trains on it."""
        return self.weights or self.agent_id

    @property
    def truncated(self) -> bool:
        return self.stop_reason is StopReason.LENGTH


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """One run of the whole workflow on one task. A failed one is data too."""

    id: str
    task: Task
    actions: tuple[Action, ...]
    status: EpisodeStatus = EpisodeStatus.OK
    reason: str = ""
    answer: str | None = None
    """What the system answered, as the verifier in code reads it."""
    outcome: float | None = None
    """0…1 from the verifier in code; None where it could not be determined."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What was measured on what it handed in, by name."""
    fault: str = ""
    """Why what it handed in was refused, as one word, with `reason` for people; the episode itself is complete."""
    sample: int = 0
    """Which sample of its task in this rollout, from 0; a task that comes up again goes on counting."""
    last_agent_id: str | None = None
    """Whose actions end every complete episode of the workflow; None where it does not know. Not recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the coach says of one action: a score, or missing with a reason. Never an invented number."""

    score: float | None
    """0…10 after caps and corrections; None when missing."""
    reason: str
    """One line: why this score, or why there is none."""
    coach: str
    raw_score: float | None = None
    """Before caps and corrections; None when equal to `score` or missing."""
    unjudgeable: bool = False
    """Missing because there is nothing to judge, by no fault of the coach's: it counts in no rate of missing ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredEpisode:
    episode: Episode
    verdicts: tuple[Verdict, ...]

    def __post_init__(self) -> None:
        if len(self.verdicts) != len(self.episode.actions):
            raise ValueError(
                f"episode {self.episode.id}: {len(self.verdicts)} verdicts for {len(self.episode.actions)} actions"
            )


ActionKey = tuple[str, int]
"""(episode id, action index): names one action of a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experience:
    """One action as its agent trains on it."""

    key: ActionKey
    agent_id: str
    """The action's owner."""
    turn: int
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    rollout_log_probs: tuple[float, ...]
    score: float | None
    """The verdict's score; None when missing."""
    masked: MaskReason | None = None
    """Known before credit; `return_unknown` is only known to the ledger."""
    truncated: bool = False
    policy_version: int = 0
    temperature: float = 1.0
    acted_as: str = ""
    """Who of those that share the agent's weights acted; empty: they are one agent's alone."""


class ExperienceBatch:
    """One agent's actions of one rollout step, right-padded. The only carrier with tensors, and mutable.

    Every `_BT` tensor is aligned with `input_ids_BT`: column t speaks of token t given the tokens before it,
    so column 0 is never a response. A plain class and not a dataclass, because Lightning's precision plugin
    walks dataclasses and would cast the float32 log-probs to bf16.
    """

    def __init__(
        self,
        *,
        step: int,
        experiences: Sequence[Experience],
        input_ids_BT: Tensor,
        attention_mask_BT: Tensor,
        response_mask_BT: Tensor,
        rollout_log_probs_BT: Tensor,
        old_log_probs_BT: Tensor | None = None,
        ref_log_probs_BT: Tensor | None = None,
        advantages_BT: Tensor | None = None,
        kl_coef: float = 0.0,
    ) -> None:
        self.step = step
        self.experiences = tuple(experiences)
        self.input_ids_BT = input_ids_BT
        """int64 [B, T], pads 0"""
        self.attention_mask_BT = attention_mask_BT
        """bool [B, T]"""
        self.response_mask_BT = response_mask_BT
        """bool [B, T], true on sampled tokens only, the end-of-turn token among them"""
        self.rollout_log_probs_BT = rollout_log_probs_BT
        """float32 [B, T], 0 outside the response"""
        self.old_log_probs_BT = old_log_probs_BT
        """float32 [B, T], the trainer's own forward before the first mini-batch"""
        self.ref_log_probs_BT = ref_log_probs_BT
        """float32 [B, T], filled by KLPenalty in `on_train_batch_start`; None without a penalty"""
        self.advantages_BT = advantages_BT
        """float32 [B, T], 0 on masked actions and outside the response"""
        self.kl_coef = kl_coef
        """beta of this step, set by KLPenalty"""

    def __len__(self) -> int:
        return len(self.experiences)

    @property
    def temperature(self) -> float:
        """The sampling temperature, one for all actions of a training rollout."""
        return self.experiences[0].temperature if self.experiences else 1.0

    def to(self, device: torch.device | str) -> ExperienceBatch:
        """Moves every tensor in place and returns itself; dtypes stay."""
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(self, name, value.to(device))
        return self

    def select(self, rows: Sequence[int]) -> ExperienceBatch:
        """The rows in the order given, trimmed to their longest sequence."""
        index = torch.as_tensor(list(rows), dtype=torch.long, device=self.input_ids_BT.device)
        length = int(self.attention_mask_BT[index].sum(1).max()) if len(rows) else 0
        given = {name: value for name, value in vars(self).items() if name.endswith("_BT") and value is not None}
        tensors = {name: value[index, :length] for name, value in given.items()}
        return ExperienceBatch(
            step=self.step, experiences=[self.experiences[i] for i in rows], kl_coef=self.kl_coef, **tensors
        )

    def __iter__(self) -> Iterator[Experience]:
        return iter(self.experiences)
