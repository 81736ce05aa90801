"""Does the default system learn, and only from what the coach says? The table in learning.md.

    python benchmarks/learning.py --jobs 2            # 5 seeds x 3 conditions, two at a time with a thread each
    python benchmarks/learning.py --seeds 0 --conditions coached

Each cell is `mappa fit` followed by `mappa test` on the report split, in a folder of its own; a finished cell
is not run again. Conditions: `coached` is the default run, `lr_0` never changes a weight, `shuffled` gives
every action the score of another action of the same agent.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

CONDITIONS: dict[str, list[str]] = {
    "coached": [],
    "lr_0": ["optimizer.lr=0"],
    "shuffled": ["coach=shuffled"],
}


def run_cell(folder: Path, seed: int, overrides: list[str]) -> dict[str, Any]:
    """Figures of one cell: report split before and after, and the wall time of the whole `fit` process."""
    if not (folder / "test.json").exists():
        start = time.monotonic()
        call("fit", f"seed={seed}", f"output_dir={folder}", *overrides, log=folder.with_suffix(".log"))
        (folder / "fit_wall_s").write_text(str(time.monotonic() - start))
        call("test", str(folder), log=folder.with_suffix(".log"))
    result = json.loads((folder / "test.json").read_text())
    return {**result, "seed": seed, "fit_wall_s": float((folder / "fit_wall_s").read_text())}


def call(*arguments: str, log: Path) -> None:
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as file:
        subprocess.run([sys.executable, "-m", "lightning_mappa", *arguments], stdout=file, stderr=file, check=True)


def interval(gains: list[float]) -> tuple[float, float]:
    """95 % t-interval of the mean over training seeds."""
    if len(gains) < 2 or np.ptp(gains) == 0:
        return gains[0], gains[0]
    half = stats.t.ppf(0.975, len(gains) - 1) * stats.sem(gains)
    return float(np.mean(gains) - half), float(np.mean(gains) + half)


def table(cells: dict[str, list[dict[str, Any]]]) -> str:
    lines = [
        "| condition | seed | n | initial | selected | gain | 95 % over problems | version | fit, s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    means = []
    for condition, results in cells.items():
        for r in results:
            low, high = r["gain_ci"]
            lines.append(
                f"| {condition} | {r['seed']} | {r['n']} | {r['initial']:.3f} | {r['selected']:.3f} "
                f"| {r['gain']:+.3f} | {low:+.3f} … {high:+.3f} | {r['selected_version']} | {r['fit_wall_s']:.0f} |"
            )
        gains = [r["gain"] for r in results]
        low, high = interval(gains)
        means.append(f"| {condition} | {len(gains)} | {np.mean(gains):+.3f} | {low:+.3f} … {high:+.3f} |")
    head = ["", "| condition | seeds | mean gain | 95 % over seeds |", "|---|---|---|---|"]
    return "\n".join([*lines, *head, *means]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--conditions", nargs="+", choices=CONDITIONS, default=list(CONDITIONS))
    parser.add_argument("--runs", type=Path, default=Path("runs/learning"), help="where the run folders go")
    parser.add_argument("--jobs", type=int, default=1, help="cells at a time; more than one get a thread each")
    arguments = parser.parse_args()
    threads = ["runtime.num_threads=1"] if arguments.jobs > 1 else []
    if threads:
        os.environ["OMP_NUM_THREADS"] = "1"
    with ThreadPoolExecutor(arguments.jobs) as pool:
        waiting = {
            condition: [
                pool.submit(run_cell, arguments.runs / f"{condition}-{seed}", seed, [*CONDITIONS[condition], *threads])
                for seed in arguments.seeds
            ]
            for condition in arguments.conditions
        }
        print(table({condition: [cell.result() for cell in cells] for condition, cells in waiting.items()}))


if __name__ == "__main__":
    main()
