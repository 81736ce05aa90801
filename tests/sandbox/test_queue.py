"""Many programs at once: none waits on its own time, none leaves anything behind."""

from __future__ import annotations

import contextlib

import pytest

from lightning_mappa.types import ToolStatus

TRAFFIC = [
    ("print(1)", ToolStatus.OK),
    ("1 / 0", ToolStatus.NONZERO),
    ("while True: print('y' * 99)", ToolStatus.OUTPUT_LIMIT),
    ("import os\nif os.fork() == 0:\n    os.setsid()\n    while True: pass\nprint(1)", ToolStatus.OK),
    ("x = bytearray(10**9)", ToolStatus.MEMORY),
    ("import os; os.kill(os.getpid(), 9)", ToolStatus.SIGNAL),
    ("open('big', 'wb').write(bytes(9 << 20))", ToolStatus.DISK_LIMIT),
    ("import time; time.sleep(9)", ToolStatus.TIMEOUT),
]


def test_47_the_clock_starts_with_the_program_and_the_queue_is_fair(harness):
    """Fifty programs on two slots wait longer than each may run; they start in the order in which they came."""
    with harness.workspace() as workspace:
        program = "import time; print(time.monotonic()); time.sleep(0.05)"
        results = harness.run_all([program] * 50, [workspace] * 50, max_concurrency=2, wall_s=0.9)
    assert [(result.status, result.reason) for result in results] == [(ToolStatus.OK, "")] * 50
    starts = [float(result.stdout) for result in results]
    assert max(starts) - min(starts) > 0.9
    order = sorted(range(50), key=starts.__getitem__)
    assert all(abs(place - number) <= 2 for place, number in enumerate(order)), order


@pytest.mark.slow
def test_two_hundred_runs_from_eight_threads_leave_nothing(harness):
    with contextlib.ExitStack() as stack:
        workspaces = [stack.enter_context(harness.workspace()) for _ in range(200)]
        limits = {"max_concurrency": 8, "wall_s": 2, "processes": 24}
        harness.run_all(["print(1)"] * 8, workspaces[:8], **limits)  # the threads are there from now on
        before = harness.state()
        programs, expected = zip(*(TRAFFIC[number % len(TRAFFIC)] for number in range(200)), strict=True)
        results = harness.run_all(programs, workspaces, **limits)
        after = harness.state()
    assert [result.status for result in results] == list(expected)
    assert after["processes"] == []
    assert len(after["descriptors"]) == len(before["descriptors"])
    assert after["groups"] == 0
    assert after["mounts"] == before["mounts"]
    assert after["memory_mb"] < before["memory_mb"] + 24
    assert harness.ask("folders") == []


def test_every_result_names_its_tier(harness, workspace):
    assert harness.run("print(1)", workspace).tier == harness.tier
