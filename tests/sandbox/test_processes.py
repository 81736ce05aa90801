"""Programs that start, hide among, kill or spy on processes, and how their ends are told."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from lightning_mappa.tools.workspace import sweep_stale
from lightning_mappa.types import ToolStatus
from tests.sandbox.harness import start


@pytest.mark.parametrize(
    ("program", "status", "exit_code", "stdout"),
    [
        ("print('lost', end=''); import os; os._exit(0)", ToolStatus.OK, 0, "lost"),
        ("import os; os._exit(7)", ToolStatus.NONZERO, 7, ""),
        ("import sys; sys.exit('x')", ToolStatus.NONZERO, 1, ""),
        ("import ctypes; ctypes.string_at(0)", ToolStatus.SIGNAL, -11, ""),
        ("import os; os.abort()", ToolStatus.SIGNAL, -6, ""),
    ],
    ids=["exit-0", "exit-7", "exit-text", "segfault", "abort"],
)
def test_16_ends_are_told_exactly(run, program, status, exit_code, stdout):
    result = run(program)
    assert (result.status, result.exit_code, result.stdout) == (status, exit_code, stdout), result


def test_17_18_daemons_die_with_the_program(run, workspace, harness):
    result = run(
        """
        import os, time
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                while True:
                    open("late", "a").write("x")
                    time.sleep(0.005)
            os._exit(0)
        time.sleep(0.1)
        print("done")
        """
    )
    assert (result.status, result.stdout) == (ToolStatus.OK, "done\n"), result
    assert result.wall_s < 2
    assert harness.state()["processes"] == []
    assert (
        run("import os, time; a = os.path.getsize('late'); time.sleep(0.1); print(os.path.getsize('late') - a)").stdout
        == "0\n"
    )


def test_19_it_can_kill_only_itself(run):
    result = run(
        """
        import os, signal
        for target in (-1, os.getppid(), 1):
            try:
                os.kill(target, signal.SIGKILL)
            except OSError:
                pass
        print("alive")
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    assert (result.status, result.exit_code, result.stdout) == (ToolStatus.SIGNAL, -9, "alive\n"), result
    assert run("print('next')").stdout == "next\n"


def test_20_no_memory_of_another_process_is_reached(run, harness):
    result = run(
        f"""
        import ctypes, os
        libc = ctypes.CDLL(None, use_errno=True)
        class Vector(ctypes.Structure):
            _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
        buffer = ctypes.create_string_buffer(8)
        local = Vector(ctypes.addressof(buffer), 8)
        for target in (1, os.getppid(), {harness.server.pid}, os.getpid()):
            remote = Vector(ctypes.addressof(buffer), 8)
            if libc.ptrace(16, target, 0, 0) == 0:
                print("attached to", target)
            if libc.process_vm_readv(target, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0) >= 0:
                print("read", target)
            if libc.process_vm_writev(target, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0) >= 0:
                print("written", target)
            for name in ("mem", "environ", "maps"):
                try:
                    open(f"/proc/{{target}}/{{name}}", "rb").close()
                except OSError:
                    continue
                if target not in (os.getpid(), 1, os.getppid()):
                    print("opened", target, name)
        """
    )
    assert (result.status, result.stdout) == (ToolStatus.OK, ""), result


def test_46_clock_name_limits_and_priority(run):
    result = run(
        """
        import os, resource, socket, time
        def change_clock(): time.clock_settime(time.CLOCK_REALTIME, 0)
        def change_name(): socket.sethostname("hostile")
        def raise_limit(): resource.setrlimit(resource.RLIMIT_NPROC, (resource.RLIM_INFINITY,) * 2)
        def go_first(): os.nice(-5)
        for attempt in (change_clock, change_name, raise_limit, go_first):
            try:
                attempt()
            except (OSError, ValueError):
                continue
            print(attempt.__name__)
        time.sleep(60)
        """,
        wall_s=0.3,
    )
    assert (result.status, result.stdout) == (ToolStatus.TIMEOUT, ""), result
    assert 0.3 <= result.wall_s < 0.8


def test_48_a_killed_harness_takes_its_programs_along_and_the_next_one_clears_up(harness, make_outside):
    second, reason = start(harness.identity, harness.tier, make_outside())
    assert (reason, second.server.stdin is None) == ("", False)
    left = Path(second.ask("open"))
    beat = left / "beat"
    program = "import time\nwhile True: open('beat', 'a').write('x'); time.sleep(0.01)"
    request = {"do": "run", "programs": [program], "workspaces": [str(left)], "limits": {"wall_s": 60}}
    print(json.dumps(request), file=second.server.stdin, flush=True)
    deadline = time.monotonic() + 10
    while not beat.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    second.server.kill()
    second.server.wait()
    time.sleep(0.3)
    size = beat.stat().st_size
    time.sleep(0.1)
    assert beat.stat().st_size == size
    sweep_stale(left.parent)
    assert not left.exists()
