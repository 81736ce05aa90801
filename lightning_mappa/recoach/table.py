"""A recoach report for a person."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table


def show(report: Mapping[str, Any], console: Console) -> None:
    """One row per agent, its largest disagreement, and what the coach has cost."""
    recorded = ", ".join(report["coach"]["recorded"]) or "nobody"
    title = f"recorded: {recorded}; new: {report['coach']['new']}; {report['episodes']} episodes"
    table = Table(
        *("agent", "n", "score", "change", "Spearman", "missing", "advantage", "flips", "update"),
        title=title,
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for agent_id, figures in report["agents"].items():
        verdicts, advantages, update = figures["verdicts"], figures["advantages"], figures["update"]
        table.add_row(
            agent_id,
            f"{verdicts['n']}/{verdicts['actions']}",
            f"{_number(verdicts['mean']['recorded'])}→{_number(verdicts['mean']['new'])}",
            _number(verdicts["mean_difference"], sign=True),
            _number(verdicts["spearman"]),
            f"{verdicts['missing']['recorded']}→{verdicts['missing']['new']}",
            _number(advantages["pearson"]),
            "none" if advantages["sign_flips"] is None else f"{advantages['sign_flips']:.1%}",
            _number(update["cosine"]),
        )
    console.print(table)
    for key, (before, after) in report["algorithm"].items():
        console.print(f"algorithm.{key}: {before} → {after}", markup=False)
    for agent_id, figures in report["agents"].items():
        for largest in figures["verdicts"]["largest"][:1]:
            console.print(
                f"{agent_id}, largest disagreement: {largest['episode_id']}, action {largest['index']}: "
                f"{largest['recorded']:g} → {largest['new']:g} ({largest['reason_new']})",
                markup=False,
            )
        if figures["update"]["reason"] is not None:
            console.print(f"{agent_id}, update: {figures['update']['reason']}", markup=False)
    console.print(
        "advantage: Pearson's correlation; flips: of its sign; update: cosine between the policy gradients at the "
        "initial weights"
    )
    costs = report["accounts"]
    if costs.get("calls") is not None:
        usd = "unknown" if costs.get("usd") is None else f"{costs['usd']:.4f}"
        console.print(f"calls of the new coach: {costs['calls']}, dollars: {usd}")


def _number(value: float | None, *, sign: bool = False) -> str:
    return "none" if value is None else format(value, "+.2f" if sign else ".2f")
