"""The one progress display of a run: a bar on a terminal, a line per step elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from types import TracebackType
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from lightning_mappa.console import PipedConsole


class RunProgress:
    """Shows step, success, mean score per agent, KL, episodes per second, what the coach costs and the time left.

    Args:
        total: rollout steps of the run.
        done: those already completed by a run that is resumed.
        enabled: false shows nothing at all.
    """

    def __init__(self, total: int, done: int = 0, enabled: bool = True) -> None:
        self._console = PipedConsole(stderr=False, quiet=not enabled, soft_wrap=True)
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=20),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not (enabled and self._console.is_terminal),
        )
        self._bar = self._progress.add_task("", total=total, completed=done)
        self._total = total

    def __enter__(self) -> RunProgress:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def evaluated(self, version: int, metrics: Mapping[str, float]) -> None:
        success = metrics.get("success")
        shown = "not gradable" if success is None else f"success {success:.3f}"
        self._console.print(
            f"version {version:>4}  selection split: {shown} (n = {metrics['n']:.0f} episodes)", highlight=False
        )

    def step_closed(self, line: Mapping[str, Any]) -> None:
        text = step_text(line)
        self._progress.update(self._bar, advance=1, description=text)
        if not self._console.is_terminal:
            self._console.print(f"step {line['step'] + 1:>4}/{self._total}  {text}", highlight=False)


def step_text(line: Mapping[str, Any]) -> str:
    """A step's metrics line in one row of text."""
    success = "-" if line["success"] is None else f"{line['success']:.2f}"
    scores = " ".join(f"{agent} {score:.1f}" for agent, score in line["score"].items())
    kls = [report["kl"] for report in line["agents"].values() if "kl" in report]
    kl = f"{fmean(kls):.3f}" if kls else "-"
    seconds = sum(line["timing_s"].values())
    speed = line["episodes"] / seconds if seconds else 0.0
    return f"success {success}  score {scores}  kl {kl}  {speed:.1f} episodes/s{_cost_text(line.get('coach', {}))}"


def _cost_text(costs: Mapping[str, Any]) -> str:
    """What the coach has cost so far and what the whole run will cost."""
    if costs.get("usd") is not None:
        return f"  coach ${costs['usd']:.2f} of about ${costs['forecast_usd']:.2f}"
    return f"  coach {costs['calls']} calls of about {costs['forecast_calls']:.0f}" if "calls" in costs else ""
