"""What a start in the sandbox costs beside a plain `python -I`. The tables in sandbox.md.

    python benchmarks/sandbox.py
    python benchmarks/sandbox.py --isolation bubblewrap --runs 20

A time is that of one whole run, from the call to the result: start, program, death of all it made. Base and sandbox
are mixed, so that what else the machine does falls on both.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from lightning_mappa.tools.python import PythonTool
from lightning_mappa.tools.workspace import Workspaces
from lightning_mappa.types import ToolCall

BARE = "print('hello')"
TABULAR = """
import pandas
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression
print("hello")
"""
WARM = ("numpy", "pandas", "sklearn.ensemble", "sklearn.linear_model", "sklearn.metrics", "sklearn.model_selection")
THREADS = 8

Run = Callable[[], object]


def plain(program: str) -> Run:
    """The same program by `python -I`, without limits."""
    command = [sys.executable, "-I", "-c", program]

    def run() -> None:
        subprocess.run(command, cwd="/", capture_output=True, check=True)

    return run


def sandboxed(tool: PythonTool, program: str) -> Run:
    call = ToolCall(name=tool.name, arguments={"code": program})

    def run() -> None:
        with Workspaces().open() as workspace:
            result = asyncio.run(tool.run(call, workspace))
        if not result.ok:
            raise SystemExit(f"{tool.tier}: {result.status} {result.reason}\n{result.stderr}")

    return run


def seconds(run: Run) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


def latency_table(cases: dict[str, tuple[Run, Run]], runs: int) -> str:
    """Milliseconds, one at a time; each case after one run that is not counted. The base runs every fifth time."""
    lines = [
        "| program | runs | median, ms | 95 %, ms | `python -I`, ms | ratio |",
        "|---|---|---|---|---|---|",
    ]
    for name, (run, base) in cases.items():
        run()
        base()
        times: list[float] = []
        bases: list[float] = []
        for number in range(runs):
            if number % 5 == 0:
                bases.append(1000 * seconds(base))
            times.append(1000 * seconds(run))
        median, base_median = statistics.median(times), statistics.median(bases)
        lines.append(
            f"| {name} | {runs} | {median:.0f} | {quantile(times, 0.95):.0f} | {base_median:.0f} "
            f"| {median / base_median:.2f} |"
        )
    return "\n".join(lines)


def throughput_table(cases: dict[str, tuple[Run, Run]], runs: int, base_runs: int) -> str:
    """Runs a second from `THREADS` threads."""
    lines = [
        f"| program | runs | runs/s, {THREADS} threads | `python -I`, runs/s | ratio |",
        "|---|---|---|---|---|",
    ]
    for name, (run, base) in cases.items():
        rate, base_rate = throughput(run, runs), throughput(base, base_runs)
        lines.append(f"| {name} | {runs} | {rate:.1f} | {base_rate:.1f} | {rate / base_rate:.1f} |")
    return "\n".join(lines)


def throughput(run: Run, runs: int) -> float:
    begin = time.perf_counter()
    with ThreadPoolExecutor(THREADS) as threads:
        for done in [threads.submit(run) for _ in range(runs)]:
            done.result()
    return runs / (time.perf_counter() - begin)


def machine() -> str:
    load = os.getloadavg()[0]
    return (
        f"{len(os.sched_getaffinity(0))} cores, Linux {platform.release()}, Python {platform.python_version()}, "
        f"user {os.geteuid()}, load {load:.1f} at the start"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--isolation", default="auto")
    parser.add_argument("--cold", action="store_true", help="where a warm interpreter cannot be had")
    parser.add_argument("--runs", type=int, default=50, help="of each program, one at a time")
    parser.add_argument("--threaded-runs", type=int, default=200)
    arguments = parser.parse_args()
    print(machine())
    bare, tabular = plain(BARE), plain(TABULAR)
    with contextlib.ExitStack() as stack:
        cold = ready(stack, arguments.isolation, ())
        cases = {"bare": (sandboxed(cold, BARE), bare)}
        if not arguments.cold:
            warm = ready(stack, arguments.isolation, WARM)
            cases["bare, warm"] = (sandboxed(warm, BARE), bare)
            cases["pandas and scikit-learn, warm"] = (sandboxed(warm, TABULAR), tabular)
        slow = {"pandas and scikit-learn": (sandboxed(cold, TABULAR), tabular)}
        print("\n" + latency_table(cases, arguments.runs), flush=True)
        print(latency_table(slow, max(arguments.runs // 10, 3)).splitlines()[-1], flush=True)
        print("\n" + throughput_table(cases, arguments.threaded_runs, arguments.threaded_runs // 10))


def ready(stack: contextlib.ExitStack, isolation: str, warm: tuple[str, ...]) -> PythonTool:
    tool = PythonTool(isolation=isolation, warm=warm, max_concurrency=THREADS)
    stack.callback(tool.close)
    took = seconds(tool.check)
    print(f"isolation: {tool.tier}, ready after {took:.2f} s", flush=True)
    return tool


if __name__ == "__main__":
    main()
