"""Does a team on tables learn on a laptop, and what does a coach with a preference do to it? dsbench_tiny.md.

    python benchmarks/dsbench_tiny.py                     # 3 seeds x 3 conditions, one after the other
    python benchmarks/dsbench_tiny.py --seeds 0 --conditions coached

Each cell is `mappa fit experiment=dsbench_tiny` and then `mappa test` on generated tables that neither training nor
selection has seen, in a folder of its own; a finished cell is not run again. The other conditions go on from where the
`coached` run of their seed ended, without `mappa test`: `leaning` gives every action on a regression a point more, and
`leaning_calibrated` puts the stateful correction over that.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from before_after import Episodes, cells_table, report, span

from lightning_mappa.metrics import fair_metrics, success_metrics
from lightning_mappa.statistics.intervals import t_interval

HERE = Path(__file__).resolve().parent
OWN_CONF = f"hydra.searchpath=[file://{HERE / 'dsbench_tiny_conf'}]"
ROLES = ("engineer", "modeler", "analyst")
KINDS = ("tables/classification", "tables/regression")
CONDITIONS: Mapping[str, Sequence[str]] = {
    "coached": (),
    "leaning": (OWN_CONF, "coach=leaning"),
    "leaning_calibrated": (OWN_CONF, "coach=leaning_calibrated"),
}
GOES_ON = ("trainer.max_steps=16", "trainer.val_check_interval=16", "optimizer.warmup_ratio=0")
FIGURES = (
    ("success", "success"),
    ("success/tables/classification", "success, classification"),
    ("success/tables/regression", "success, regression"),
    ("fair/accuracy", "accuracy"),
    ("fair/f1", "F1"),
    ("fair/mae_percent", "MAE, % of range"),
    ("fair/rmse_percent", "RMSE, % of range"),
    ("leaks", "engineers that fit on test rows"),
)
SAMPLES = 2
"""Episodes per table of the report split."""


def run_cell(runs: Path, condition: str, seed: int, extra: Sequence[str]) -> Path:
    folder = runs / f"{condition}-{seed}"
    first = condition == "coached"
    if (folder / "fit_wall_s").exists() and ((folder / "test.json").exists() or not first):
        return folder
    overrides = [*CONDITIONS[condition], *extra]
    if not first:
        trained = (runs / f"coached-{seed}" / "export").absolute()
        overrides += [
            *GOES_ON,
            *(f"agents.{role}.model={{path:'{trained / role}',dtype:float32,lora:null}}" for role in ROLES),
        ]
    log = folder.with_suffix(".log")
    start = time.monotonic()
    call(log, "fit", "experiment=dsbench_tiny", f"seed={seed}", f"output_dir={folder}", *overrides)
    (folder / "fit_wall_s").write_text(str(time.monotonic() - start))
    if first:
        call(log, "test", str(folder), f"datamodule.val_n_samples={SAMPLES}")
    return folder


def call(log: Path, *arguments: str) -> None:
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))}
    with log.open("a") as file:
        command = [sys.executable, "-m", "lightning_mappa", *arguments]
        subprocess.run(command, stdout=file, stderr=file, check=True, env=environment)


def figures(episodes: Episodes) -> dict[str, float]:
    """Success as a mean over tables, fair metrics over all episodes, and how many engineers fit on test rows."""
    leaks = fmean(
        ".fit(Z" in call.arguments["code"]
        for scored in episodes
        for action in scored.episode.actions
        if action.agent_id == "engineer"
        for call in action.tool_calls
    )
    return {"leaks": leaks, **success_metrics(episodes), **fair_metrics(episodes)}


def fair_table(folders: Mapping[int, Path]) -> str:
    """Means over seeds, as the paper has them: a failed run counts as accuracy 0.5, F1 0 and errors of 50 %."""
    initial = [figures(report(folder, "initial")) for folder in folders.values()]
    selected = [figures(report(folder, "selected")) for folder in folders.values()]
    lines = ["| figure | before | after | change | 95 % over seeds |", "|---|---|---|---|---|"]
    for key, name in FIGURES:
        before, after = [f[key] for f in initial], [f[key] for f in selected]
        change = [b - a for a, b in zip(before, after, strict=True)]
        found = t_interval(change)
        shown = "" if found is None else span(found)
        lines.append(f"| {name} | {fmean(before):.3f} | {fmean(after):.3f} | {fmean(change):+.3f} | {shown} |")
    return "\n".join(lines)


def drift_table(folders: Mapping[str, Mapping[int, Path]], last: int) -> str:
    """Success by kind over the last `last` training steps, sampled at temperature 1, and mean scores."""
    lines = [
        "| condition | seeds | classification | regression | gap | 95 % over seeds | scores, classification "
        "| scores, regression |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for condition, of_seed in folders.items():
        ends = [end_of_training(folder, last) for folder in of_seed.values()]
        columns = [fmean(end["success"][kind] for end in ends) for kind in KINDS]
        gaps = [end["success"][KINDS[1]] - end["success"][KINDS[0]] for end in ends]
        scores = [
            " ".join(f"{fmean(end['score'][kind][role] for end in ends):.1f}" for role in ROLES) for kind in KINDS
        ]
        found = t_interval(gaps)
        shown = "" if found is None else span(found)
        lines.append(
            f"| {condition} | {len(ends)} | {columns[0]:.3f} | {columns[1]:.3f} | {fmean(gaps):+.3f} | {shown} "
            f"| {scores[0]} | {scores[1]} |"
        )
    return "\n".join(lines)


def end_of_training(folder: Path, last: int) -> dict[str, Any]:
    """Per kind of task success and each role's mean score, weighed by episodes."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()][-last:]
    success: dict[str, list[float]] = defaultdict(list)
    score: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for line in lines:
        for kind, found in line["kinds"].items():
            success[kind] += [found["success"]] * found["episodes"]
            for role, mean in found["score"].items():
                score[kind][role] += [mean] * found["episodes"]
    return {
        "success": {kind: fmean(values) for kind, values in success.items()},
        "score": {kind: {role: fmean(values) for role, values in of.items()} for kind, of in score.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--conditions", nargs="+", choices=CONDITIONS, default=list(CONDITIONS))
    parser.add_argument("--runs", type=Path, default=Path("runs/dsbench_tiny"), help="where the run folders go")
    parser.add_argument("--last", type=int, default=8, help="training steps that the drift is read off")
    parser.add_argument("overrides", nargs="*", help="for every fit, like runtime.num_threads=1")
    arguments = parser.parse_args()
    folders = {
        condition: {seed: run_cell(arguments.runs, condition, seed, arguments.overrides) for seed in arguments.seeds}
        for condition in arguments.conditions
    }
    if "coached" in folders:
        cells = cells_table(folders["coached"], problems="tables", samples=SAMPLES)
        print(cells, fair_table(folders["coached"]), sep="\n\n", end="\n\n")
    print(drift_table(folders, arguments.last))


if __name__ == "__main__":
    main()
