"""What a set of episodes says of the system: how often it is right, and how each agent behaves.

Everything is grouped by task id, never by the order in which episodes arrived.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from lightning_mappa.types import Action, ScoredEpisode

FIXTURE = "fixture/"
"""How the kind of every task begins that is shipped with the package as an example of a format."""

FAIR = "fair/"
"""How the name of every metric begins that has a value for failed episodes too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One graded attempt at a task."""

    outcome: float
    """0…1; right is 1.0."""
    answer: str | None
    """As the task's verifier normalises it: equal answers are equal texts."""


Samples = Mapping[str, Sequence[Sample]]
"""Task id → its graded samples; empty where none could be graded."""


def samples_by_task(episodes: Iterable[ScoredEpisode]) -> dict[str, list[Sample]]:
    """Graded samples of every task; a task of which none was graded is there with an empty list."""
    grouped: dict[str, list[Sample]] = {}
    for scored in episodes:
        episode = scored.episode
        samples = grouped.setdefault(episode.task.id, [])
        if episode.outcome is not None:
            samples.append(Sample(outcome=episode.outcome, answer=episode.answer))
    return grouped


def outcomes_by_task(episodes: Iterable[ScoredEpisode]) -> dict[str, list[float]]:
    return {task: [s.outcome for s in samples] for task, samples in samples_by_task(episodes).items()}


def mean_at_k(samples: Samples) -> float:
    """Mean over tasks of the mean over their samples: every task weighs the same, however many were graded.

    Raises `ValueError` where no task has a graded sample.
    """
    means = [fmean(sample.outcome for sample in group) for group in samples.values() if group]
    if not means:
        raise ValueError("no task has a graded sample")
    return fmean(means)


def pass_at_k(n: int, right: int, k: int) -> float:
    """Chance that one of `k` samples drawn without return from `n`, of which `right` are right, is right.

    The unbiased estimate 1 − C(n − c, k) / C(n, k) of arXiv 2107.03374. Raises `ValueError` unless
    0 ≤ c ≤ n and 1 ≤ k ≤ n.
    """
    if not 0 <= right <= n or not 1 <= k <= n:
        raise ValueError(f"pass@{k} of {right} right among {n}: needs 0 <= right <= n and 1 <= k <= n")
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)


def majority(samples: Sequence[Sample]) -> float:
    """Outcome of the answer that most samples give; where several share the lead, the mean over them.

    That mean is what drawing one of them would give, and it does not depend on their order. A sample without
    an answer has no vote; no votes at all are 0.
    """
    votes: dict[str, list[float]] = defaultdict(list)
    for sample in samples:
        if sample.answer is not None:
            votes[sample.answer].append(sample.outcome)
    if not votes:
        return 0.0
    most = max(map(len, votes.values()))
    # Sorted, because the last bit of a sum depends on its order.
    return fmean(sorted(fmean(outcomes) for outcomes in votes.values() if len(outcomes) == most))


def task_values(samples: Samples, k: int) -> dict[str, dict[str, float]]:
    """Figure → task id → its value there: `mean@k`, `pass@j` for j = 2, 4 … and k, and `maj@k`.

    A figure with a j is there for the tasks of which at least j samples were graded, `maj@k` for those with k.
    `pass@1` is left out: it is `mean@k`, and would be one more test to correct for. With k = 1 the one figure is
    `success`.
    """
    graded = {task: group for task, group in samples.items() if group}
    means = {task: fmean(sample.outcome for sample in group) for task, group in graded.items()}
    if k == 1:
        return {"success": means}
    values = {f"mean@{k}": means}
    for j in sorted({*(2**power for power in range(1, k.bit_length()) if 2**power <= k), k}):
        values[f"pass@{j}"] = {
            task: pass_at_k(len(group), _right(group), j) for task, group in graded.items() if len(group) >= j
        }
    values[f"maj@{k}"] = {task: majority(group) for task, group in graded.items() if len(group) >= k}
    return values


def repeated_sampling_metrics(samples: Samples, k: int) -> dict[str, float]:
    """Means over tasks of `task_values`, those of no task left out; `tasks_short` counts tasks with fewer than k
    graded samples. Nothing where no task has one."""
    if not any(samples.values()):
        return {}
    metrics = {name: fmean(values.values()) for name, values in task_values(samples, k).items() if values}
    return {**metrics, "tasks_short": float(sum(len(group) < k for group in samples.values()))}


def success_metrics(episodes: Sequence[ScoredEpisode]) -> dict[str, float]:
    """Success in all and per task kind, and with several samples per task what `repeated_sampling_metrics` gives.

    `n` counts graded episodes and `ungraded` the others. `fixture` is the share of tasks that are shipped
    examples; it is there only where some are.
    """
    samples = samples_by_task(episodes)
    kinds: dict[str, dict[str, list[Sample]]] = defaultdict(dict)
    for scored in episodes:
        task = scored.episode.task
        kinds[task.kind][task.id] = samples[task.id]
    metrics = {}
    graded = sum(map(len, samples.values()))
    if graded:
        metrics["success"] = mean_at_k(samples)
    for kind, of_kind in sorted(kinds.items()):
        if any(of_kind.values()):
            metrics[f"success/{kind}"] = mean_at_k(of_kind)
    k = max(Counter(scored.episode.task.id for scored in episodes).values(), default=0)
    if k > 1:
        metrics |= repeated_sampling_metrics(samples, k)
    fixtures = sum(len(of_kind) for kind, of_kind in kinds.items() if kind.startswith(FIXTURE))
    if fixtures:
        metrics["fixture"] = fixtures / len(samples)
    return {**metrics, "n": float(graded), "ungraded": float(len(episodes) - graded)}


def fair_metrics(episodes: Iterable[ScoredEpisode]) -> dict[str, float]:
    """Means of the metrics called `fair/…` that episodes were graded with, in which a failed hand-in counts as what
    its task says, and `…/n`, over how many episodes each is. Episodes of other tasks have none."""
    values: dict[str, list[float]] = defaultdict(list)
    for scored in episodes:
        for name, value in scored.episode.metrics.items():
            if name.startswith(FAIR):
                values[name].append(value)
    means = {name: fmean(found) for name, found in sorted(values.items())}
    return {**means, **{f"{name}/n": float(len(values[name])) for name in means}}


def tool_rates(episodes: Iterable[ScoredEpisode], agent_id: str) -> dict[str, float]:
    """Share of the agent's actions that call a tool, and of its tool runs that end well; none over nothing.

    Where several act with the agent's weights, of each: `<who>/tool_call_rate`.
    """
    acted: dict[str, list[Action]] = defaultdict(list)
    for scored in episodes:
        for action in scored.episode.actions:
            if action.owner == agent_id:
                acted[f"{action.agent_id}/" if action.weights else ""].append(action)
    return {f"{who}{name}": rate for who, actions in acted.items() for name, rate in _tool_rates(actions).items()}


def mean_scores(episodes: Iterable[ScoredEpisode]) -> dict[str, float]:
    """Agent → mean of the verdicts on its actions, missing ones left out; none over nothing."""
    return {agent: fmean(scores) for agent, scores in _scores(episodes).items() if scores}


def score_metrics(episodes: Sequence[ScoredEpisode]) -> dict[str, float]:
    """`score/<agent>`, the mean verdict, and `score_missing/<agent>`, the share of actions without one."""
    scores = _scores(episodes)
    means = {f"score/{agent}": fmean(given) for agent, given in scores.items()}
    acted = Counter(action.agent_id for scored in episodes for action in scored.episode.actions)
    return {**means, **{f"score_missing/{agent}": 1 - len(scores[agent]) / n for agent, n in sorted(acted.items())}}


def behaviour_metrics(episodes: Iterable[ScoredEpisode]) -> dict[str, float]:
    """`behaviour/<agent>/…` of every agent that acted: `actions` per episode, mean `length` of a response in
    tokens, `truncated_rate` at the token limit, `tool_call_rate` and `tool_ok_rate`.

    An action that was not generated, because its prompt was too long, has no length and counts as an action.
    """
    of_agent: dict[str, list[Action]] = defaultdict(list)
    played: Counter[str] = Counter()
    for scored in episodes:
        for action in scored.episode.actions:
            of_agent[action.agent_id].append(action)
        played.update({action.agent_id for action in scored.episode.actions})
    metrics: dict[str, float] = {}
    for agent_id, actions in sorted(of_agent.items()):
        figures = {"actions": len(actions) / played[agent_id], **_tool_rates(actions)}
        generated = [action for action in actions if action.response_ids]
        if generated:
            figures["length"] = fmean(len(action.response_ids) for action in generated)
            figures["truncated_rate"] = fmean(action.truncated for action in generated)
        metrics |= {f"behaviour/{agent_id}/{name}": value for name, value in figures.items()}
    return metrics


def _scores(episodes: Iterable[ScoredEpisode]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = defaultdict(list)
    for scored in episodes:
        for action, verdict in zip(scored.episode.actions, scored.verdicts, strict=True):
            if verdict.score is not None:
                found[action.agent_id].append(verdict.score)
    return found


def _right(group: Sequence[Sample]) -> int:
    return sum(sample.outcome == 1.0 for sample in group)


def _tool_rates(actions: Sequence[Action]) -> dict[str, float]:
    runs = [result for action in actions for result in action.tool_results]
    rates = {}
    if actions:
        rates["tool_call_rate"] = fmean(bool(action.tool_calls) for action in actions)
    if runs:
        rates["tool_ok_rate"] = fmean(result.ok for result in runs)
    return rates
