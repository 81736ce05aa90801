"""A comparison on the terminal and as plain data."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from lightning_mappa.compare.conditions import Comparison, Group, Versus
from lightning_mappa.statistics.intervals import Interval

SELECTION_NOTE = (
    "Not every run has been read on its report split: these are figures of the selection split, which chose the "
    "weights, and so too good. `mappa test RUN` first."
)
FEW_SEEDS = 3
FEW_SEEDS_NOTE = f"Below {FEW_SEEDS} seeds an interval over seeds says next to nothing."


def show(comparison: Comparison, console: Console) -> None:
    console.print(_groups(comparison))
    if comparison.differing:
        console.print(_differences(comparison))
    if comparison.versus:
        console.print(_versus_table(comparison))
    for note in notes(comparison):
        console.print(note, style="dim", highlight=False)


def notes(comparison: Comparison) -> list[str]:
    found = []
    if comparison.split == "selection":
        found.append(SELECTION_NOTE)
    if any(len(group.runs) < FEW_SEEDS for group in comparison.groups):
        found.append(FEW_SEEDS_NOTE)
    unpaired = [v.name for v in comparison.versus if v.over_problems is None]
    if unpaired:
        first = comparison.groups[0].name
        found.append(f"{', '.join(unpaired)}: no seed with a problem in common with {first}, so nothing is paired.")
    return found


def as_data(comparison: Comparison) -> dict[str, Any]:
    """JSON-able; intervals are [low, high]."""
    return {
        "split": comparison.split,
        "groups": [_group_data(group) for group in comparison.groups],
        "differing": {key: list(map(str, values)) for key, values in comparison.differing.items()},
        "versus": [_versus_data(versus) for versus in comparison.versus],
        "notes": notes(comparison),
    }


def _groups(comparison: Comparison) -> Table:
    table = Table(title=f"success on the {comparison.split} split", title_justify="left")
    for name in (
        "",
        "seeds",
        "initial",
        "selected",
        "95 % over seeds",
        "gain",
        "95 % over seeds",
        "95 % over problems",
        "runs",
    ):
        left = name in ("", "seeds", "runs")
        table.add_column(name, justify="left" if left else "right", overflow="fold")
    for group in comparison.groups:
        table.add_row(
            group.name,
            ", ".join(map(str, group.runs)),
            f"{group.initial:.3f}",
            f"{group.selected:.3f}",
            _span(group.selected_over_seeds, signed=False),
            f"{group.gain:+.3f}",
            _span(group.gain_over_seeds),
            _span(group.gain_over_problems),
            ", ".join(str(run.folder) for run in group.runs.values()),
        )
    return table


def _differences(comparison: Comparison) -> Table:
    table = Table(title="what differs in config", title_justify="left")
    table.add_column("key")
    for group in comparison.groups:
        table.add_column(group.name, overflow="fold")
    for key, values in comparison.differing.items():
        table.add_row(key, *map(str, values))
    return table


def _versus_table(comparison: Comparison) -> Table:
    first = comparison.groups[0].name
    table = Table(title=f"selected weights against those of {first}", title_justify="left")
    for name in ("", "paired seeds", "difference", "95 % over problems", "95 % over seeds", "p (Holm)", ""):
        table.add_column(name, justify="right" if name.startswith(("d", "9", "p (")) else "left")
    for versus in comparison.versus:
        paired = versus.over_problems
        table.add_row(
            versus.name,
            ", ".join(map(str, versus.seeds)) or "none",
            "" if paired is None else f"{paired.gain.value:+.3f}",
            _span(None if paired is None else paired.gain),
            _span(versus.over_seeds),
            "" if versus.p_holm is None else f"{versus.p_holm:.2g}",
            "" if versus.p_holm is None else ("significant" if versus.significant else "not significant"),
        )
    return table


def _group_data(group: Group) -> dict[str, Any]:
    return {
        "name": group.name,
        "seeds": list(group.runs),
        "runs": [str(run.folder) for run in group.runs.values()],
        "initial": group.initial,
        "selected": group.selected,
        "selected_ci_over_seeds": _pair(group.selected_over_seeds),
        "gain": group.gain,
        "gain_ci_over_seeds": _pair(group.gain_over_seeds),
        "gain_ci_over_problems": _pair(group.gain_over_problems),
    }


def _versus_data(versus: Versus) -> dict[str, Any]:
    paired = versus.over_problems
    return {
        "name": versus.name,
        "seeds": list(versus.seeds),
        "problems": 0 if paired is None else paired.n,
        "difference": None if paired is None else paired.gain.value,
        "ci_over_problems": None if paired is None else _pair(paired.gain),
        "ci_over_seeds": _pair(versus.over_seeds),
        "p_value": None if paired is None else paired.p_value,
        "p_holm": versus.p_holm,
        "significant": versus.significant,
    }


def _pair(interval: Interval | None) -> list[float] | None:
    return None if interval is None else [interval.low, interval.high]


def _span(interval: Interval | None, signed: bool = True) -> str:
    if interval is None:
        return "–"  # noqa: RUF001
    form = "+.3f" if signed else ".3f"
    return f"{interval.low:{form}} … {interval.high:{form}}"
