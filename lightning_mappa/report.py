"""The report split of a run: read once, recorded, and what is said of it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from lightning_mappa.errors import ConfigError
from lightning_mappa.files import read_json
from lightning_mappa.metrics import FIXTURE, outcomes_by_task, samples_by_task, task_values
from lightning_mappa.run_folder import RunFolder
from lightning_mappa.statistics.intervals import cluster_bootstrap, wilson
from lightning_mappa.statistics.paired import holm, paired, paired_gain
from lightning_mappa.tasks.base import TaskSource
from lightning_mappa.tasks.leaks import normalised
from lightning_mappa.types import ScoredEpisode, Task

TEST = "test.json"
READINGS = "report_readings.jsonl"


def refuse_second_reading(folder: RunFolder) -> None:
    """Raises `ConfigError` where the split has been read to its end; removing test.json does not unread it."""
    done = [line for line in _readings(folder) if line["event"] == "read"]
    if done or (folder.path / TEST).exists():
        where = f"{folder.path / TEST}" if (folder.path / TEST).exists() else f"{folder.path / READINGS}"
        raise ConfigError(f"the report split of {folder.path} has been read already: see {where}")


def refuse_shared_problems(source: TaskSource) -> None:
    """Raises `ConfigError` where a problem of the report split is one that weights were trained or selected on.

    A problem is its text and, where tasks have it in their metadata, the fingerprint `data` of their files.
    """
    report = {_problem(task) for task in source.tasks("report")}
    for split in ("train", "selection"):
        shared = [task.id for task in source.tasks(split) if _problem(task) in report]
        if shared:
            raise ConfigError(
                f"task: {len(shared)} problems of the {split} split are in the report split too, among them"
                f" {', '.join(shared[:5])}: figures over it would be too good"
            )


@contextmanager
def reading(folder: RunFolder, **settings: Any) -> Iterator[None]:
    """Records that a reading begins, and how it ends."""
    _note(folder, "begun", **settings)
    try:
        yield
    except BaseException as error:
        _note(folder, "broken off", reason=f"{type(error).__name__}: {error}")
        raise
    _note(folder, "read")


def report_figures(
    initial: Sequence[ScoredEpisode], selected: Sequence[ScoredEpisode], *, k: int, seed: int
) -> dict[str, Any]:
    """What `k` samples per problem say of both systems and of the gain.

    `initial_ci` and `selected_ci` are over problems: Wilson's with one sample of each, else a bootstrap of
    problems with all their samples. `figures` has every estimate on the problems where both sides have it, its
    gain, p-value, and Holm's p-value over all of them.
    """
    before, after = outcomes_by_task(initial), outcomes_by_task(selected)
    return {
        **paired_gain(before, after, seed=seed),
        "initial_ci": _interval(before, k, seed),
        "selected_ci": _interval(after, k, seed),
        "figures": compared_figures(initial, selected, k=k, seed=seed),
        **_fixture_note([*initial, *selected]),
    }


def compared_figures(
    before: Sequence[ScoredEpisode], after: Sequence[ScoredEpisode], *, k: int, seed: int
) -> dict[str, dict[str, Any]]:
    """Estimate → n, before, after, gain, interval and p-values. One that no problem has on both sides is left out."""
    ours, theirs = task_values(samples_by_task(before), k), task_values(samples_by_task(after), k)
    found = {}
    for name, values in ours.items():
        common = values.keys() & theirs[name].keys()
        if common:
            found[name] = paired(
                {task: [values[task]] for task in common},
                {task: [theirs[name][task]] for task in common},
                seed=seed,
            )
    adjusted = holm({name: figure.p_value for name, figure in found.items()})
    return {
        name: {
            "n": figure.n,
            "initial": figure.before,
            "selected": figure.after,
            "gain": figure.gain.value,
            "gain_ci": [figure.gain.low, figure.gain.high],
            "p_value": figure.p_value,
            "p_holm": adjusted[name],
        }
        for name, figure in found.items()
    }


def peak_and_selected(folder: RunFolder, selected_version: int) -> dict[str, Any]:
    """Success on the selection split at its peak over all versions, and at the version that was selected.

    Both are too good as figures of the system: the split chose them. None where the run has no summary.
    """
    if not folder.summary.exists():
        return {"peak": None, "selected": None}
    return dict(peak_of(read_json(folder.summary)["val"]["history"], selected_version))


def peak_of(history: Mapping[str, float | None], selected_version: int | None) -> dict[str, dict[str, Any] | None]:
    """`history` maps version → success; of equal ones the earliest is the peak."""
    graded = {int(version): success for version, success in history.items() if success is not None}
    if not graded:
        return {"peak": None, "selected": None}
    peak = min(graded, key=lambda version: (-graded[version], version))
    chosen = None
    if selected_version in graded:
        chosen = {"version": selected_version, "success": graded[selected_version]}
    return {"peak": {"version": peak, "success": graded[peak]}, "selected": chosen}


def report_text(result: Mapping[str, Any]) -> str:
    """For a person: the gain, and beside it what the selection split said."""
    low, high = result["gain_ci"]
    verdict = "significant" if result["significant"] else "not significant"
    lines = [
        f"{result.get('data', 'report split')}, n = {result['n']}: {result['initial']:.3f} → {result['selected']:.3f}, "
        f"gain {result['gain']:+.3f} [{low:+.3f}, {high:+.3f}], p = {result['p_value']:.2g}: {verdict}"
    ]
    for name, figure in result["figures"].items():
        if len(result["figures"]) > 1:
            low, high = figure["gain_ci"]
            lines.append(
                f"  {name}: {figure['initial']:.3f} → {figure['selected']:.3f}, gain {figure['gain']:+.3f} "
                f"[{low:+.3f}, {high:+.3f}], p (Holm) = {figure['p_holm']:.2g}"
            )
    shown = [
        f"{name} {found['success']:.3f} at version {found['version']}"
        for name, found in result["selection"].items()
        if found is not None
    ]
    if shown:
        lines.append(f"selection split, which chose: {', '.join(shown)}")
    return "\n".join(lines)


def _interval(outcomes: Mapping[str, Sequence[float]], k: int, seed: int) -> list[float]:
    single = [samples[0] for samples in outcomes.values() if samples]
    if k == 1 and set(single) <= {0.0, 1.0}:
        found = wilson(round(sum(single)), len(single))
    else:
        found = cluster_bootstrap(outcomes, seed=seed)
    return [found.low, found.high]


def _problem(task: Task) -> tuple[str, str]:
    return normalised(task.prompt), str(task.metadata.get("table_fingerprint", ""))


def _fixture_note(episodes: Sequence[ScoredEpisode]) -> dict[str, str]:
    kinds = sorted({scored.episode.task.kind for scored in episodes if scored.episode.task.kind.startswith(FIXTURE)})
    return {"data": f"report split ({', '.join(kinds)})"} if kinds else {}


def _readings(folder: RunFolder) -> list[dict[str, Any]]:
    path = folder.path / READINGS
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def _note(folder: RunFolder, event: str, **fields: Any) -> None:
    line = {"event": event, "at": datetime.now(UTC).isoformat(timespec="seconds"), **fields}
    with (folder.path / READINGS).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
