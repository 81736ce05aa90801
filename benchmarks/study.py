"""The first study: which choices of the algorithm matter on `task=arithmetic` with `model=tiny`. Writes docs/study.md.

    python benchmarks/study.py --jobs 2               # 8 cells x 5 seeds, two at a time with a thread each
    python benchmarks/study.py --tables               # only writes what has been measured so far

Needs `pip install -e '.[dev,plot]'`.

One factor differs from the default per cell (`trajectory_mean` differs from `trajectory`). A run is `mappa fit` and
then `mappa test`; what came of it goes into docs/study.json at once, and is not measured again unless that entry is
deleted.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from threading import Lock
from typing import Any

from scipy import stats

from lightning_mappa.files import read_json, write_json
from lightning_mappa.statistics.intervals import Interval, t_interval
from lightning_mappa.statistics.paired import holm

DOCS = Path(__file__).parents[1] / "docs"
RESULTS, PAGE, PICTURE = DOCS / "study.json", DOCS / "study.md", DOCS / "study.png"


@dataclass(frozen=True, slots=True)
class Cell:
    overrides: tuple[str, ...]
    against: str | None = "default"
    """The cell that it differs from in one factor."""


CELLS: Mapping[str, Cell] = {
    "default": Cell((), None),
    "outcome": Cell(("experiment=outcome_only",)),
    "agent": Cell(("algorithm.return_scope=agent",)),
    "trajectory": Cell(("algorithm.return_scope=trajectory",)),
    "trajectory_mean": Cell(("algorithm.return_scope=trajectory", "algorithm.return_agg=mean"), "trajectory"),
    "baseline": Cell(("algorithm.baseline=agent_turn",)),
    "norm_all": Cell(("algorithm.norm_scope=all",)),
    "partial": Cell(("experiment=mathchat_partial_info",)),
}


class Results:
    """What has been measured, by `cell-seed`, in a file that is whole after every run."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = Lock()
        self.runs: dict[str, dict[str, Any]] = read_json(path) if path.exists() else {}

    def add(self, name: str, run: dict[str, Any]) -> None:
        with self._lock:
            self.runs[name] = run
            write_json(self._path, dict(sorted(self.runs.items())))

    def of(self, cell: str) -> dict[int, dict[str, Any]]:
        """By seed."""
        found = [run for run in self.runs.values() if run["cell"] == cell]
        return {run["seed"]: run for run in sorted(found, key=lambda run: run["seed"])}


def measure(cell: str, seed: int, folder: Path, threads: Sequence[str]) -> dict[str, Any]:
    """One run. A folder that an interrupted one left is begun anew."""
    shutil.rmtree(folder, ignore_errors=True)
    log = folder.with_suffix(".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    with log.open("w") as file:
        for arguments in (
            ("fit", f"seed={seed}", f"output_dir={folder}", *CELLS[cell].overrides, *threads),
            ("test", str(folder)),
        ):
            command = [sys.executable, "-m", "lightning_mappa", *arguments]
            subprocess.run(command, stdout=file, stderr=file, check=True)
    test, summary = read_json(folder / "test.json"), read_json(folder / "summary.json")
    return {
        "cell": cell,
        "seed": seed,
        "overrides": list(CELLS[cell].overrides),
        **{key: test[key] for key in ("n", "initial", "selected", "gain", "gain_ci", "selected_version")},
        "history": summary["val"]["history"],
        "episodes": summary["counts"]["produced"],
        "wall_s": round(time.monotonic() - start, 1),
    }


def curve_mean(run: Mapping[str, Any]) -> float:
    """Mean success over the evaluations of a run: high for one that learns early."""
    return fmean(run["history"].values())


def differences(results: Results, cell: str) -> list[float]:
    """Per seed, how much more success on the report split the cell ends with than the cell it is held against."""
    against = CELLS[cell].against
    if against is None:
        return []
    own, other = results.of(cell), results.of(against)
    return [own[seed]["selected"] - other[seed]["selected"] for seed in own if seed in other]


def p_value(values: Sequence[float]) -> float:
    """Two-sided, of a paired t-test over seeds."""
    return float(stats.ttest_1samp(values, 0.0).pvalue)


def written(interval: Interval | None) -> str:
    return "" if interval is None else f"{interval.low:+.3f} … {interval.high:+.3f}"


def tables(results: Results) -> str:
    cells = [
        "| cell | overrides | seeds | initial | selected | gain | 95 % over seeds | mean of the curve | wall, s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, cell in CELLS.items():
        runs = list(results.of(name).values())
        if not runs:
            continue
        means = {key: fmean(run[key] for run in runs) for key in ("initial", "selected", "gain", "wall_s")}
        cells.append(
            f"| {name} | {' '.join(cell.overrides) or 'none'} | {len(runs)} | {means['initial']:.3f} "
            f"| {means['selected']:.3f} | {means['gain']:+.3f} | {written(t_interval([r['gain'] for r in runs]))} "
            f"| {fmean(map(curve_mean, runs)):.3f} | {means['wall_s']:.0f} |"
        )
    pairs = {name: values for name in CELLS if len(values := differences(results, name)) > 1}
    adjusted = holm({name: p_value(values) for name, values in pairs.items() if any(values)})
    versus = ["| cell | against | seeds | difference | 95 % over seeds | p (Holm) |", "|---|---|---|---|---|---|"]
    for name, values in pairs.items():
        versus.append(
            f"| {name} | {CELLS[name].against} | {len(values)} | {fmean(values):+.3f} | {written(t_interval(values))} "
            f"| {f'{adjusted[name]:.3f}' if name in adjusted else 'the same runs'} |"
        )
    return "\n".join([*cells, "", *versus])


def draw(results: Results) -> None:
    """Success on the selection split by step: a line per seed, and the mean of the cell."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 4, figsize=(12, 5), sharex=True, sharey=True)
    for name, panel in zip(CELLS, axes.flat, strict=True):
        runs = list(results.of(name).values())
        for run in runs:
            curve = sorted((int(version), success) for version, success in run["history"].items())
            panel.plot(*zip(*curve, strict=True), color="0.75", linewidth=1)
        if runs:
            versions = sorted(set.intersection(*(set(map(int, run["history"])) for run in runs)))
            panel.plot(versions, [fmean(run["history"][str(v)] for run in runs) for v in versions], color="C0")
        panel.set_title(name)
    figure.supxlabel("rollout steps")
    figure.supylabel("success, selection split")
    figure.tight_layout()
    figure.savefig(PICTURE, dpi=110)


def write_page(results: Results) -> None:
    """Replaces what stands between the two marks of docs/study.md; the words around it are ours."""
    head, _, rest = PAGE.read_text().partition("<!-- tables -->\n")
    _, _, tail = rest.partition("<!-- end -->\n")
    PAGE.write_text(f"{head}<!-- tables -->\n{tables(results)}\n<!-- end -->\n{tail}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--cells", nargs="+", choices=CELLS, default=list(CELLS))
    parser.add_argument("--runs", type=Path, default=Path("runs/study"), help="where the run folders go")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time; more than one get a thread each")
    parser.add_argument("--tables", action="store_true", help="measure nothing")
    arguments = parser.parse_args()
    results = Results(RESULTS)
    threads = ["runtime.num_threads=1"] if arguments.jobs > 1 else []
    if threads:
        os.environ["OMP_NUM_THREADS"] = "1"

    def run(cell: str, seed: int) -> None:
        name = f"{cell}-{seed}"
        if name not in results.runs:
            results.add(name, measure(cell, seed, arguments.runs / name, threads))
            print(json.dumps(results.runs[name]), flush=True)

    if not arguments.tables:
        with ThreadPoolExecutor(arguments.jobs) as pool:
            # By seed, so that what is there after half the time can be compared.
            for waiting in [pool.submit(run, cell, seed) for seed in arguments.seeds for cell in arguments.cells]:
                waiting.result()
    write_page(results)
    draw(results)


if __name__ == "__main__":
    main()
