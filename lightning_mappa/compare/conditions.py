"""Runs grouped by what they are, and what one group gains over another: by seed and by problem."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from lightning_mappa.compare.runs import Outcomes, RunResult, SplitRead
from lightning_mappa.errors import ConfigError
from lightning_mappa.statistics.intervals import Interval, cluster_bootstrap, t_interval
from lightning_mappa.statistics.paired import LEVEL, PairedGain, holm, paired

ABSENT = "(absent)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """All runs of one condition, one per seed."""

    name: str
    """A, B, …"""
    runs: Mapping[int, RunResult]
    """By seed."""
    initial: float
    selected: float
    """Means over seeds of the mean over problems."""
    gain: float
    selected_over_seeds: Interval | None
    """None below two seeds."""
    gain_over_seeds: Interval | None
    gain_over_problems: Interval
    """With these weights, on other problems."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Versus:
    """A later group against the first, on the seeds and problems that both have."""

    name: str
    seeds: tuple[int, ...]
    over_seeds: Interval | None
    """Of the difference, from one number per shared seed: what new training runs would show."""
    over_problems: PairedGain | None
    """Paired by problem within seeds; None where they share none."""
    p_holm: float | None = None

    @property
    def significant(self) -> bool:
        return self.p_holm is not None and self.p_holm < LEVEL


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    split: SplitRead
    groups: tuple[Group, ...]
    differing: Mapping[str, tuple[Any, ...]]
    """Dotted key → its value in each group, for the keys that are not the same in all."""
    versus: tuple[Versus, ...]


def compare_runs(runs: Sequence[RunResult], *, seed: int = 0) -> Comparison:
    """The first run's group is what the others are compared with.

    Raises `ConfigError` for two runs of one condition and seed, and a run of which nothing was graded.
    """
    grouped: dict[tuple[tuple[str, Any], ...], list[RunResult]] = defaultdict(list)
    for run in runs:
        grouped[tuple(sorted(run.condition.items()))].append(run)
    groups = tuple(_group(_letter(place), of_group, seed) for place, of_group in enumerate(grouped.values()))
    conditions = [next(iter(group.runs.values())).condition for group in groups]
    versus = [_versus(groups[0], other, seed) for other in groups[1:]]
    adjusted = holm({v.name: v.over_problems.p_value for v in versus if v.over_problems is not None})
    return Comparison(
        split=runs[0].split,
        groups=groups,
        differing=_differing(conditions),
        versus=tuple(
            Versus(
                name=v.name,
                seeds=v.seeds,
                over_seeds=v.over_seeds,
                over_problems=v.over_problems,
                p_holm=adjusted.get(v.name),
            )
            for v in versus
        ),
    )


def _group(name: str, runs: Sequence[RunResult], seed: int) -> Group:
    by_seed: dict[int, RunResult] = {}
    for run in runs:
        if run.seed in by_seed:
            raise ConfigError(
                f"{by_seed[run.seed].folder} and {run.folder} are the same config with the same seed: name one"
            )
        by_seed[run.seed] = run
    initial = [_mean(run.initial, run) for run in runs]
    selected = [_mean(run.selected, run) for run in runs]
    gains = [after - before for before, after in zip(initial, selected, strict=True)]
    by_problem: dict[str, list[float]] = defaultdict(list)
    for run in runs:
        for problem in run.initial.keys() & run.selected.keys():
            before, after = run.initial[problem], run.selected[problem]
            if before and after:
                by_problem[problem].append(fmean(after) - fmean(before))
    return Group(
        name=name,
        runs=dict(sorted(by_seed.items())),
        initial=fmean(initial),
        selected=fmean(selected),
        gain=fmean(gains),
        selected_over_seeds=t_interval(selected),
        gain_over_seeds=t_interval(gains),
        gain_over_problems=cluster_bootstrap(by_problem, seed=seed),
    )


def _versus(first: Group, other: Group, seed: int) -> Versus:
    shared = tuple(sorted(first.runs.keys() & other.runs.keys()))
    ours: dict[str, list[float]] = defaultdict(list)
    theirs: dict[str, list[float]] = defaultdict(list)
    differences = []
    for number in shared:
        one, two = first.runs[number].selected, other.runs[number].selected
        common = [problem for problem in sorted(one.keys() & two.keys()) if one[problem] and two[problem]]
        for problem in common:
            # The mean of a run, so that every seed weighs the same in a problem.
            ours[problem].append(fmean(one[problem]))
            theirs[problem].append(fmean(two[problem]))
        if common:
            differences.append(fmean(fmean(two[p]) - fmean(one[p]) for p in common))
    return Versus(
        name=other.name,
        seeds=shared,
        over_seeds=t_interval(differences),
        over_problems=paired(ours, theirs, seed=seed) if ours else None,
    )


def _mean(outcomes: Outcomes, run: RunResult) -> float:
    graded = [fmean(samples) for samples in outcomes.values() if samples]
    if not graded:
        raise ConfigError(f"{run.folder}: nothing of its {run.split} split was graded")
    return fmean(graded)


def _differing(conditions: Sequence[Mapping[str, Any]]) -> dict[str, tuple[Any, ...]]:
    keys = sorted({key for condition in conditions for key in condition})
    values = {key: tuple(condition.get(key, ABSENT) for condition in conditions) for key in keys}
    return {key: row for key, row in values.items() if len(set(map(repr, row))) > 1}


def _letter(place: int) -> str:
    return chr(ord("A") + place) if place < 26 else f"G{place + 1}"
