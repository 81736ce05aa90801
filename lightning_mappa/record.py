"""What a run writes down: a metrics line and a transcript per step, and the summary at the end."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import fmean
from typing import Any, Protocol

from lightning_mappa.coaches.base import accounts
from lightning_mappa.coaches.budget import forecast
from lightning_mappa.files import write_json
from lightning_mappa.kind_metrics import kind_metrics
from lightning_mappa.metrics import behaviour_metrics, fair_metrics, mean_scores, success_metrics, tool_rates
from lightning_mappa.report import peak_of
from lightning_mappa.rollout.ledger import Step, StepCounts
from lightning_mappa.rollout.plan import Rollout
from lightning_mappa.rollout.transcripts import evaluation_path, step_path, write_transcript
from lightning_mappa.run_folder import RunFolder
from lightning_mappa.types import EpisodeStatus, ScoredEpisode

COSTS = ("calls", "usd")


class Listener(Protocol):
    """Shows a run to a person."""

    def evaluated(self, version: int, metrics: Mapping[str, float]) -> None: ...

    def step_closed(self, line: Mapping[str, Any]) -> None: ...


def evaluation_metrics(episodes: Sequence[ScoredEpisode]) -> dict[str, float]:
    """What the system achieved and how its agents behaved; the same for the same episodes in any order."""
    return {**success_metrics(episodes), **fair_metrics(episodes), **behaviour_metrics(episodes)}


class RunRecord:
    """Collects a step until it is closed, then writes it.

    `state()` is what a resumed run needs of it; everything else is on disk.

    Args:
        agents: all who act, trained or frozen, in the order in which scores are shown.
        max_steps, evaluations: of the whole run, which forecasts are for.
        coach: asked what it has cost, if it keeps accounts (`coaches.base.KeepsAccounts`).
        isolation: tool → the tier its programs run under; the summary says it.
    """

    def __init__(
        self,
        folder: RunFolder,
        agents: Sequence[str],
        listener: Listener,
        *,
        max_steps: int,
        evaluations: int = 1,
        coach: object,
        isolation: Mapping[str, str],
    ) -> None:
        self._folder = folder
        self._agents = tuple(agents)
        self._listener = listener
        self._max_steps = max_steps
        self._n_evaluations = evaluations
        self._evaluation_costs: Counter[str] = Counter()
        self._coach = coach
        self._isolation = dict(isolation)
        self._started = time.monotonic()
        self._wall_before = 0.0
        self._timing: dict[str, float] = {}
        self._timing_total: dict[str, float] = {}
        self._counts: Counter[str] = Counter()
        self._masked: Counter[str] = Counter()
        self._evaluations: dict[int, dict[str, float]] = {}
        self._scores: dict[str, list[float]] = {}
        self._ratio_max = 0.0
        self._resources: dict[str, Any] = {}
        self.closed: set[int] = set()
        """Steps whose line is written."""

    def time(self, part: str, seconds: float) -> None:
        """Adds to what the step so far has spent on `part`."""
        self._timing[part] = self._timing.get(part, 0.0) + seconds

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """What the coach is asked meanwhile is forecast by the number of evaluations, and not of steps."""
        before = accounts(self._coach)
        yield
        after = accounts(self._coach)
        for name in COSTS:
            if after.get(name) is not None:
                self._evaluation_costs[name] += after[name] - (before.get(name) or 0)

    def evaluation(self, version: int, episodes: Sequence[ScoredEpisode], metrics: Mapping[str, float]) -> None:
        self._evaluations[version] = dict(metrics)
        path = evaluation_path(self._folder.transcripts, "selection", version)
        write_transcript(path, episodes, step=version, split="selection")
        self._listener.evaluated(version, metrics)

    def rollout(self, step: int, rollout: Rollout) -> None:
        self.time("rollout", rollout.rollout_s)
        self.time("coach", rollout.coach_s)

    def use(self, usage: Mapping[str, Any], *, restarts: int) -> None:
        """What the summary says of memory, weight sync and how often the run was started again."""
        self._resources = {**usage, "restarts": restarts}

    def close_step(self, step: Step, counts: StepCounts) -> None:
        """Writes transcript and metrics line of a finished step, and adds it to the totals of the summary."""
        write_transcript(
            step_path(self._folder.transcripts, step.number),
            step.episodes,
            step=step.number,
            split="train",
            rows=step.rows,
            credits=step.credits,
        )
        line = self._line(step, counts)
        self._folder.append_metrics(line)
        self._listener.step_closed(line)
        self.closed.add(step.number)
        self._timing_total = self._times()
        self._timing.clear()
        self._masked.update(counts.masked)
        self._counts.update(
            produced=counts.produced,
            trained=counts.trained,
            queued=counts.queued,
            frozen=counts.frozen,
            masked=sum(counts.masked.values()),
        )
        for agent, score in line["score"].items():
            first_last = self._scores.setdefault(agent, [score, score])
            first_last[1] = score
        self._ratio_max = max(self._ratio_max, line["mismatch"]["ratio_max"])

    def _line(self, step: Step, counts: StepCounts) -> dict[str, Any]:
        graded = [e.episode.outcome for e in step.episodes if e.episode.outcome is not None]
        scores = mean_scores(step.episodes)
        failed = [e.episode.reason for e in step.episodes if e.episode.status is EpisodeStatus.FAILED]
        line: dict[str, Any] = {
            "step": step.number,
            "episodes": len(step.episodes),
            "failed": dict(Counter(failed)),
            "success": fmean(graded) if graded else None,
            "score": {agent: scores[agent] for agent in self._agents if agent in scores},
            "kinds": kind_metrics(step.episodes, self._agents),
            "agents": {agent: {**report, **tool_rates(step.episodes, agent)} for agent, report in step.reports.items()},
            "counts": {
                "produced": counts.produced,
                "trained": counts.trained,
                "masked": dict(counts.masked),
                "queued": counts.queued,
                "frozen": counts.frozen,
            },
            "mismatch": {"ratio_max": max(report.get("mismatch/ratio_max", 1.0) for report in step.reports.values())},
            "timing_s": dict(self._timing),
        }
        if step.number + 1 in self._evaluations:
            line["val"] = self._evaluations[step.number + 1]
        return {**line, **self._costs(len(self.closed) + 1)}

    def _costs(self, steps_done: int) -> dict[str, Any]:
        """What the coach has cost, and what calls and dollars will come to; nothing where it costs nothing."""
        figures = dict(accounts(self._coach))
        for name in COSTS:
            so_far, of_evaluations = figures.get(name), self._evaluation_costs[name]
            if so_far is not None and steps_done:
                steps = forecast(so_far - of_evaluations, steps_done, self._max_steps)
                evaluations = forecast(of_evaluations, max(1, len(self._evaluations)), self._n_evaluations)
                figures[f"forecast_{name}"] = steps + evaluations
        return {"coach": figures} if figures else {}

    def state(self) -> dict[str, Any]:
        return {
            "wall_s": self._wall(),
            "timing_s": self._times(),
            "counts": dict(self._counts),
            "masked": dict(self._masked),
            "evaluations": {str(version): metrics for version, metrics in self._evaluations.items()},
            "evaluation_costs": dict(self._evaluation_costs),
            "scores": self._scores,
            "ratio_max": self._ratio_max,
            "closed": sorted(self.closed),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._wall_before = state["wall_s"]
        self._timing_total = dict(state["timing_s"])
        self._counts = Counter(state["counts"])
        self._masked = Counter(state["masked"])
        self._evaluations = {int(version): metrics for version, metrics in state["evaluations"].items()}
        self._evaluation_costs = Counter(state.get("evaluation_costs", {}))
        self._scores = {agent: list(values) for agent, values in state["scores"].items()}
        self._ratio_max = state["ratio_max"]
        self.closed = set(state["closed"])

    def _times(self) -> dict[str, float]:
        parts = self._timing_total.keys() | self._timing.keys()
        return {part: self._timing_total.get(part, 0.0) + self._timing.get(part, 0.0) for part in sorted(parts)}

    def _wall(self) -> float:
        return self._wall_before + time.monotonic() - self._started

    def write_summary(self, *, status: str, selected_version: int | None) -> dict[str, Any]:
        """Writes summary.json and returns what it says."""
        summary = self._summary(status, selected_version)
        write_json(self._folder.summary, summary)
        return summary

    def _summary(self, status: str, selected_version: int | None) -> dict[str, Any]:
        """`val.success.selected` is None when no version was selected or evaluated."""
        selected = self._evaluations.get(-1 if selected_version is None else selected_version, {})
        initial = self._evaluations.get(0, {})
        history = {str(version): metrics.get("success") for version, metrics in sorted(self._evaluations.items())}
        return {
            "status": status,
            "wall_s": self._wall(),
            "steps": len(self.closed),
            "selected_version": selected_version,
            "val": {
                "success": {"initial": initial.get("success"), "selected": selected.get("success")},
                "peak": peak_of(history, selected_version)["peak"],
                "n": int(initial.get("n", 0)),
                "history": history,
            },
            "counts": {name: self._counts[name] for name in ("produced", "trained", "masked", "queued", "frozen")},
            "masked": dict(self._masked),
            "timing_s": self._times(),
            "mismatch": {"ratio_max": self._ratio_max},
            "isolation": self._isolation,
            "resources": self._resources,
            "score": {agent: {"first": values[0], "last": values[1]} for agent, values in self._scores.items()},
            **self._costs(len(self.closed)),
        }
