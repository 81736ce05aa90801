"""Tables of runs before and after training, paired by problem."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean

from lightning_mappa.metrics import outcomes_by_task
from lightning_mappa.rollout.transcripts import read_episodes
from lightning_mappa.statistics.intervals import Interval, t_interval
from lightning_mappa.statistics.paired import PairedGain, paired
from lightning_mappa.types import ScoredEpisode

Episodes = Sequence[ScoredEpisode]


def report(folder: Path, which: str) -> Episodes:
    """Of `mappa test`; `which`: initial or selected."""
    return read_episodes(folder / "transcripts" / f"report-{which}.jsonl")


def over_problems(folders: Iterable[Path]) -> PairedGain:
    """Gain paired by problem; the runs are of different seeds, whose problems are different ones."""
    before: dict[str, list[float]] = {}
    after: dict[str, list[float]] = {}
    for folder in folders:
        for gathered, which in ((before, "initial"), (after, "selected")):
            found = outcomes_by_task(report(folder, which))
            gathered.update({f"{folder.name}/{task}": outcomes for task, outcomes in found.items()})
    return paired(before, after, seed=0)


def cells_table(folders: Mapping[int, Path], *, problems: str, samples: int) -> str:
    """By seed and in all. A folder holds test.json, and in `fit_wall_s` what `mappa fit` took."""
    lines = [
        f"| seed | {problems} | episodes | initial | selected | gain | 95 % over {problems} | version | fit, s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    gains = []
    for seed, folder in folders.items():
        result = json.loads((folder / "test.json").read_text())
        gain = over_problems([folder])
        gains.append(gain.gain.value)
        wall = float((folder / "fit_wall_s").read_text())
        lines.append(f"{_row(str(seed), gain, samples)}| {result['selected_version']} | {wall:.0f} |")
    lines.append(f"{_row('all', over_problems(folders.values()), samples)}| | |")
    return "\n".join([*lines, "", f"Gain over seeds: {signed(t_interval(gains), fmean(gains))}."])


def _row(name: str, found: PairedGain, samples: int) -> str:
    return (
        f"| {name} | {found.n} | {found.n * samples} | {found.before:.3f} | {found.after:.3f} "
        f"| {found.gain.value:+.3f} | {span(found.gain)} "
    )


def span(interval: Interval) -> str:
    return f"{interval.low:+.3f} … {interval.high:+.3f}"


def signed(interval: Interval | None, mean: float) -> str:
    return f"{mean:+.3f}" if interval is None else f"{mean:+.3f} [{interval.low:+.3f}, {interval.high:+.3f}]"
