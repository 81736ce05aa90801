"""From tasks per step to optimizer steps of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentBatch:
    """One agent's share of a rollout step; every figure is the most that there can be."""

    turns: int
    """Actions in one episode."""
    actions: int
    mini_batches: int
    """Of trained agents: as many optimizer steps."""
    forwards_per_rank: int
    """Micro-batches of one mini-batch that one rank runs, padding among them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunBatches:
    prompts: int
    samples_per_prompt: int
    steps: int
    agents: Mapping[str, AgentBatch]
    evaluations: int
    judged_in_evaluations: int | None = 0
    """Episodes whose actions the coach scores too, over the whole run; None where their number is the task's."""

    @property
    def episodes(self) -> int:
        """Of a step."""
        return self.prompts * self.samples_per_prompt

    @property
    def total_episodes(self) -> int:
        return self.episodes * self.steps

    @property
    def judged_episodes(self) -> int:
        return self.total_episodes + (self.judged_in_evaluations or 0)

    @property
    def total_actions(self) -> int:
        return self.steps * sum(agent.actions for agent in self.agents.values())

    @property
    def optimizer_steps(self) -> int:
        """Of the run, all agents together."""
        return self.steps * sum(agent.mini_batches for agent in self.agents.values())


def turns_of(agent_ids: Sequence[str], max_turns: Mapping[str, int], order: Sequence[str] | None) -> dict[str, int]:
    """Most actions of each agent in one episode.

    `order` is who is seated when; an agent may come more than once in it, or never. Without one, as in a workflow
    that decides as it goes, each agent is counted once.
    """
    times = {agent_id: 1 if order is None else list(order).count(agent_id) for agent_id in agent_ids}
    return {agent_id: times[agent_id] * max_turns[agent_id] for agent_id in agent_ids}


def agent_batch(
    *, episodes: int, turns: int, trained: bool, mini_batch_size: int, ranks: int, rows_per_forward: int
) -> AgentBatch:
    actions = episodes * turns
    full = min(mini_batch_size, actions)
    forwards = -(-full // rows_per_forward)
    return AgentBatch(
        turns=turns,
        actions=actions,
        mini_batches=-(-actions // mini_batch_size) if trained else 0,
        forwards_per_rank=-(-forwards // ranks) if trained else 0,
    )


def evaluations_of(steps: int, interval: int) -> int:
    """The untrained system, and every `interval` steps."""
    return 1 + steps // min(interval, steps)


def longest_sequence(
    context: int, task_tokens: int, written: Sequence[int], *, tool_turns: int = 0, tokens_per_tool_output: int = 0
) -> int:
    """Most tokens of prompt and response: the task, all that the agents in `written` may write, tool outputs."""
    return min(context, task_tokens + sum(written) + tool_turns * tokens_per_tool_output)


def rows_per_forward(micro_batch_size: int, micro_batch_tokens: int | None, length: int, mini_batch_size: int) -> int:
    """Sequences of `length` tokens in one forward; one at least, however long it is."""
    rows = min(micro_batch_size, mini_batch_size)
    return rows if micro_batch_tokens is None else max(1, min(rows, micro_batch_tokens // length))
