"""Does a pretrained model learn from verdicts on a laptop? SmolLM2-135M on word problems: a part of docs/study.md.

    python benchmarks/smollm2_arithmetic.py               # 3 seeds, one after the other
    python benchmarks/smollm2_arithmetic.py --seeds 0

Each row is `mappa fit experiment=smollm2_arithmetic` and then `mappa test` on problems that neither training nor
selection has seen; a finished one is not run again.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from pathlib import Path

from before_after import cells_table


def run(folder: Path, seed: int) -> Path:
    if (folder / "test.json").exists():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    log = folder.with_suffix(".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    call(log, "fit", "experiment=smollm2_arithmetic", f"seed={seed}", f"output_dir={folder}")
    (folder / "fit_wall_s").write_text(str(time.monotonic() - start))
    call(log, "test", str(folder))
    return folder


def call(log: Path, *arguments: str) -> None:
    with log.open("a") as file:
        subprocess.run([sys.executable, "-m", "lightning_mappa", *arguments], stdout=file, stderr=file, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs", type=Path, default=Path("runs/smollm2_arithmetic"), help="where the run folders go")
    arguments = parser.parse_args()
    folders = {seed: run(arguments.runs / f"seed-{seed}", seed) for seed in arguments.seeds}
    print(cells_table(folders, problems="problems", samples=1))


if __name__ == "__main__":
    main()
