"""A comparison as a picture: every run as a point, every group with its interval. Needs matplotlib, an extra."""

from __future__ import annotations

import importlib
from pathlib import Path
from statistics import fmean

from lightning_mappa.compare.conditions import Comparison
from lightning_mappa.errors import ConfigError


def draw_plot(comparison: Comparison, file: Path) -> None:
    """Writes `file`, in the format of its suffix: png, svg or pdf.

    Left: success of the selected weights, a point per seed and the interval over seeds. Right: difference from the
    first group with the interval over problems. Raises `ConfigError` without matplotlib or for another suffix.
    """
    if file.suffix not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"--plot {file}: allowed are files that end in .png, .svg or .pdf")
    try:
        importlib.import_module("matplotlib").use("Agg")
        pyplot = importlib.import_module("matplotlib.pyplot")
    except ModuleNotFoundError:
        raise ConfigError(f"--plot {file} needs matplotlib: pip install 'lightning-mappa[plot]'") from None
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 1.2 + 0.5 * len(comparison.groups)), sharey=True)
    names = [group.name for group in comparison.groups]
    for place, group in enumerate(comparison.groups):
        of_seeds = [fmean(fmean(s) for s in run.selected.values() if s) for run in group.runs.values()]
        left.plot(of_seeds, [place] * len(of_seeds), "o", color="0.7", zorder=1)
        left.plot(group.selected, place, "D", color="C0", zorder=3)
        if group.selected_over_seeds is not None:
            left.hlines(place, group.selected_over_seeds.low, group.selected_over_seeds.high, color="C0", zorder=2)
    right.axvline(0.0, color="0.7", linewidth=1)
    for versus in comparison.versus:
        if versus.over_problems is not None:
            gain, place = versus.over_problems.gain, names.index(versus.name)
            right.hlines(place, gain.low, gain.high, color="C1")
            right.plot(gain.value, place, "D", color="C1")
    left.set_yticks(range(len(names)), names)
    left.set_ylim(len(names) - 0.5, -0.5)
    left.set_xlabel(f"success, {comparison.split} split (95 % over seeds)")
    right.set_xlabel(f"difference from {names[0]} (95 % over problems)")
    figure.tight_layout()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file)
    pyplot.close(figure)
