"""Programs that are forked from a warm interpreter: it is quick, and nothing leads back to it or to another run."""

import asyncio
import os
import signal
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from lightning_mappa.errors import ConfigError
from lightning_mappa.tools.bubblewrap import Bubblewrap
from lightning_mappa.tools.python import PythonTool
from lightning_mappa.tools.sandbox import Limits, PlainProcess
from lightning_mappa.tools.warm import warm_up
from lightning_mappa.tools.workspace import Workspaces
from lightning_mappa.types import ToolStatus


@pytest.fixture(scope="module")
def warm():
    tool = PythonTool(warm=["numpy"], wall_s=5, memory_mb=256, processes=16, max_concurrency=8)
    try:
        tool.check()
    except ConfigError as error:
        if os.geteuid() == 0 and "CI" in os.environ:
            raise
        pytest.skip(f"no warm interpreter on this machine: {error}")
    yield tool
    tool.close()


@pytest.fixture
def start(warm, workspace):
    def start(code, where=workspace, tool=warm):
        (call,) = tool.parse(f"```python\n{code}\n```")
        return asyncio.run(tool.run(call, where))

    return start


def server_pid(tool):
    bwrap = tool._sandbox._server._popen.pid
    (server,) = children(bwrap)
    return server


def children(pid):
    return [int(child) for child in open(f"/proc/{pid}/task/{pid}/children").read().split()]


def test_modules_are_imported_already(start):
    assert start("import sys; print('numpy' in sys.modules, 'sklearn' in sys.modules)").stdout == "True False\n"


def test_a_start_takes_less_than_the_import(start):
    """About 30 ms on an idle machine; the bar leaves room for one that is not."""
    times = []
    for _ in range(9):
        begin = time.perf_counter()
        assert start("import numpy; print(numpy.arange(4).sum())").stdout == "6\n"
        times.append(time.perf_counter() - begin)
    assert statistics.median(times) < 0.25


def test_no_run_alters_the_interpreter_of_the_next(start):
    spoil = "import json, numpy, os, builtins; json.dumps = numpy.mean = builtins.len = None; os.environ['X'] = '1'"
    assert start(spoil + "\nimport sys; sys.path.append('/ws'); sys.modules['random'] = None").ok
    probe = "import json, numpy, os, random, sys; print(json.dumps(1), numpy.mean([3]), len(''), 'X' in os.environ)"
    assert start(probe + "\nprint('/ws' in sys.path)").stdout == "1 3.0 0 False\nFalse\n"


def test_no_two_runs_draw_the_same_numbers(start):
    code = (
        "import random, numpy, uuid, os; print(random.random(), numpy.random.rand(), uuid.uuid4(), os.urandom(4).hex())"
    )
    one, two = (start(code).stdout.split() for _ in range(2))
    assert all(a != b for a, b in zip(one, two, strict=True))


def test_it_holds_nothing_of_the_server(start):
    """Its descriptors, its capabilities, its lack of a filter, its files, its addresses in /proc."""
    result = start(
        """
import ctypes, os
def says(attempt, *arguments):
    try:
        return attempt(*arguments)
    except OSError as error:
        return type(error).__name__
written = [number for number in range(3, 1 << 16) if says(os.write, number, b"x") != "OSError"]
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(written, *(status[key].split() for key in ("Seccomp", "NoNewPrivs", "Groups", "CapPrm", "CapBnd")), os.getppid())
for file in ("mem", "environ", "maps", "root/ws", "cwd/ws", "fd/0", "exe"):
    print(file, says(open, f"/proc/1/{file}"))
print(says(open, "/proc/self/exe", "r+b"), says(os.listdir, "/proc/1/fd"))
says(os.kill, 1, 9)
print(ctypes.CDLL(None).setns(os.open("/proc/self/ns/mnt", os.O_RDONLY), 0))
environment = open("/proc/self/environ").read().split("\\0")
print(sorted(os.environ) == sorted(line.split("=")[0] for line in environment if line))
"""
    )
    assert result.ok, result
    first, *files, own, setns, environment = result.stdout.splitlines()
    assert first == f"[] ['2'] ['1'] [] ['{0:016x}'] ['{0:016x}'] 1"
    assert all(line.endswith(" PermissionError") for line in files), files
    assert own == "PermissionError PermissionError"
    assert (setns, environment) == ("-1", "True")


def test_what_another_run_has_open_is_out_of_reach(warm, start):
    """Shared memory, a terminal, an abstract socket and a semaphore of one run, sought by a second."""
    hold = """
import ctypes, os, pty, socket, time
open("/dev/shm/held", "w").write("x"); open("/tmp/held", "w").write("x"); open("held", "w").write("x")
pty.openpty()
listener = socket.socket(socket.AF_UNIX); listener.bind("\\0held"); listener.listen()
port = socket.create_server(("127.0.0.1", 4567))
ctypes.CDLL(None).semget(77, 1, 0o1666)
open("ready", "w"); time.sleep(60)
"""
    seek = """
import ctypes, os, socket
print(os.listdir("/dev/shm"), os.listdir("/tmp"), os.listdir("/ws"), [n for n in os.listdir("/dev/pts") if n != "ptmx"])
print(sorted(int(n) for n in os.listdir("/proc") if n.isdigit()), ctypes.CDLL(None).semget(77, 1, 0))
for family, address in ((socket.AF_UNIX, "\\0held"), (socket.AF_INET, ("127.0.0.1", 4567))):
    print(socket.socket(family).connect_ex(address) != 0)
os.kill(-1, 9)
"""

    async def both():
        with Workspaces().open() as one, Workspaces().open() as two:
            (held,), (sought,) = (warm.parse(f"```python\n{code}\n```") for code in (hold, seek))
            holding = asyncio.create_task(warm.run(held, one))
            while not (one / "ready").exists():
                assert not holding.done(), holding.result()
                await asyncio.sleep(0.01)
            result = await warm.run(sought, two)
            assert not holding.done()
            holding.cancel()
            await asyncio.wait([holding])
            return result

    result = asyncio.run(both())
    assert result.stdout == "[] [] [] []\n[1, 2] -1\nTrue\nTrue\n"
    assert start("print(1)").ok


@pytest.mark.parametrize(
    "code",
    [
        "import os\nwhile True:\n    try: os.fork()\n    except OSError: break",
        "import os\nfor i in range(9):\n    if os.fork() == 0: os.setsid(); import time; time.sleep(60)",
        "x = []\nwhile True: x.append(bytes(1 << 20))",
        "import os\nfor target in (1, -1, os.getppid(), 0):\n    try: os.kill(target, 9)\n    except OSError: pass",
        "import socket\nheld = []\nwhile True: held.append(socket.socketpair())",
    ],
    ids=["forks", "daemons", "memory", "kills", "descriptors"],
)
def test_the_interpreter_survives_a_hostile_run(warm, start, code):
    before = server_pid(warm)
    assert start(code).status is not ToolStatus.SANDBOX_ERROR
    assert start("print(1)").stdout == "1\n"
    assert server_pid(warm) == before
    assert children(before) == []


def test_how_it_ends_is_what_the_interpreter_would_do(start, workspace):
    code = """
import atexit, ctypes, sys, threading, time
file = open("left_open", "w"); file.write("x" * 10)
atexit.register(print, "at exit")
class Thing:
    def __del__(self): print("deleted")
libc = ctypes.CDLL(None)
libc.fopen.restype = ctypes.c_void_p
libc.fputs(b"y" * 10, ctypes.c_void_p(libc.fopen(b"left_open_by_c", b"w")))
thing = Thing()
cycle = [Thing()]; cycle.append(cycle)
threading.Thread(target=lambda: (time.sleep(0.05), print("thread"))).start()
sys.exit("last words")
"""
    result = start(code)
    assert (result.exit_code, result.stderr) == (1, "last words\n")
    assert result.stdout == "thread\nat exit\ndeleted\ndeleted\n"
    assert (workspace / "left_open").read_text() == "x" * 10
    assert (workspace / "left_open_by_c").read_text() == "y" * 10
    assert start("import signal; signal.raise_signal(signal.SIGINT)").stderr.endswith("KeyboardInterrupt\n")
    assert start("import sys; sys.exit(300)").exit_code == 300 & 0xFF


def test_many_short_runs_at_once_all_end_well_and_leave_nothing(warm, start, workspace):
    start("print(1)")
    server = server_pid(warm)

    def held():
        return len(os.listdir("/proc/self/fd")), len(os.listdir(f"/proc/{server}/fd")), children(server)

    before = held()
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(start, ["import os; os._exit(7)"] * 100))
    assert {(result.status, result.exit_code) for result in results} == {(ToolStatus.NONZERO, 7)}
    assert held() == before


def test_a_dead_interpreter_ends_its_run_as_a_failure_of_the_sandbox_and_is_replaced(warm, start, workspace):
    start("print(1)")
    before = server_pid(warm)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(start, "import time; open('begun', 'w'); time.sleep(60)")
        while not (workspace / "begun").exists():
            time.sleep(0.01)
        os.kill(before, signal.SIGKILL)
        assert running.result().status is ToolStatus.SANDBOX_ERROR
    assert start("print(1)").stdout == "1\n"
    assert server_pid(warm) != before


def test_an_interpreter_that_cannot_be_replaced_is_a_failure_of_the_sandbox(start):
    broken = PythonTool(warm=["numpy"])
    broken.check()
    broken.close()
    broken._sandbox._modules = ("no_such_module",)
    result = start("print(1)", tool=broken)
    assert result.status is ToolStatus.SANDBOX_ERROR
    assert "`import no_such_module` failed" in result.reason
    broken.close()


def test_runs_die_with_a_killed_harness(warm, workspace):
    harness = """
import asyncio, sys, pathlib
from lightning_mappa.tools.python import PythonTool
tool = PythonTool(warm=["json"], wall_s=60)
call, = tool.parse("```python\\nimport time\\nwhile True: open('beat', 'a').write('x'); time.sleep(0.01)\\n```")
asyncio.run(tool.run(call, pathlib.Path(sys.argv[1])))
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


@pytest.mark.parametrize(
    ("modules", "sentence"),
    [
        (["no_such_module"], r"warm=\[no_such_module\]: .*`import no_such_module` failed: ModuleNotFoundError"),
        ("numpy", "must be a list of module names"),
        (["numpy; import os"], "must be a list of module names"),
    ],
)
def test_what_cannot_be_warm_is_refused_in_a_sentence(warm, modules, sentence):
    with pytest.raises(ConfigError, match=sentence):
        PythonTool(warm=modules).check()


def test_limits_that_a_warm_program_cannot_live_in_are_refused(warm):
    with pytest.raises(ConfigError, match=r"tools\.python\.warm=\[numpy\]: "):
        PythonTool(warm=["numpy"], memory_mb=24).check()


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("import threading, time; threading.Thread(target=time.sleep, args=[9], daemon=True).start()", "threads"),
        ("FILE = open('/dev/null')", "hold files open"),
        ("import mmap; MAP = mmap.mmap(-1, 4096)", "share writable memory"),
    ],
)
def test_modules_that_runs_would_share_are_refused(tmp_path, body, sentence):
    (tmp_path / "shared.py").write_text(body)
    program = "from lightning_mappa.tools import warm_server; print(warm_server.preload(('shared',)))"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert sentence in done.stdout, done.stderr


@pytest.mark.parametrize(
    "cold",
    [
        PlainProcess(),
        Bubblewrap(binary="bwrap", drop_uid=True, user_namespace=True),
        Bubblewrap(binary="bwrap", drop_uid=False, user_namespace=True, mount_proc=False),
    ],
)
def test_a_tier_that_cannot_be_warm_is_refused(cold):
    with pytest.raises(ConfigError, match=r"set tools\.python\.warm=\[\]"):
        warm_up(cold, ["json"], Limits())
