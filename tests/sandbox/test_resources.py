"""Programs that take too much of something. The number of each is its place in the list of hostile programs."""

from __future__ import annotations

import time

import pytest

from lightning_mappa.types import ToolStatus

FORKS = """
import os, time
for _ in range(200):
    if os.fork() == 0:
        time.sleep(30)
        os._exit(0)
"""
THREADS = """
import threading, time
for _ in range(200):
    threading.Thread(target=time.sleep, args=(30,), daemon=True).start()
"""
MEMORY = "x = bytearray(10**9)"
CHILDREN = """
import os, time
for _ in range(8):
    if os.fork() == 0:
        held = bytearray(60 << 20)
        for at in range(0, len(held), 4096):
            held[at] = 1
        time.sleep(30)
        os._exit(0)
time.sleep(30)
"""
SHARED = """
import ctypes, mmap, os, time
try:
    os.memfd_create("a")
except OSError:
    pass
else:
    raise SystemExit("memory without an owner")
assert ctypes.CDLL(None).shmget(0, 1 << 20, 0o1600) < 0
def hold(megabytes):
    held = mmap.mmap(-1, megabytes << 20)
    for _ in range(megabytes):
        held.write(bytes(1 << 20))
    return held
shared = hold(100)
for _ in range(2):
    if os.fork() == 0:
        mine = hold(90)
        time.sleep(30)
time.sleep(30)
"""
UNLINKED = """
import os, time
for number in range(40):
    file = os.open("gone", os.O_CREAT | os.O_WRONLY)
    os.unlink("gone")
    os.write(file, bytes(1 << 20))
time.sleep(30)
"""
UNLINKED_AND_MAPPED = """
import mmap, os, time
held = []
for number in range(10):
    with open("gone", "w+b") as file:
        os.unlink("gone")
        os.truncate(file.fileno(), 4 << 20)
        held.append(mmap.mmap(file.fileno(), 4 << 20))
    held[-1].write(bytes(4 << 20))
time.sleep(30)
"""
ONE_FILE = """
with open("big", "wb") as file:
    for _ in range(100):
        file.write(bytes(1 << 20))
        file.flush()
"""
MANY_FILES = """
import os
for number in range(10**6):
    os.close(os.open(str(number), os.O_CREAT | os.O_WRONLY))
"""
FLOOD = "while True: print('y' * 99)"
NO_NEWLINE = """
import os
for _ in range(100):
    os.write(1, b"x" * (1 << 20))
"""


@pytest.mark.parametrize(
    ("program", "status", "within_s"),
    [
        pytest.param(FORKS, ToolStatus.PROCESS_LIMIT, 5, id="01-forks"),
        pytest.param(THREADS, ToolStatus.PROCESS_LIMIT, 5, id="02-threads"),
        pytest.param(MEMORY, ToolStatus.MEMORY, 1, id="03-memory"),
        pytest.param(CHILDREN, ToolStatus.MEMORY, 5, id="04-memory-of-eight-children"),
        pytest.param(SHARED, ToolStatus.MEMORY, 5, id="04-shared-memory"),
        pytest.param(UNLINKED, ToolStatus.DISK_LIMIT, 5, id="06-unlinked-files"),
        pytest.param(UNLINKED_AND_MAPPED, ToolStatus.DISK_LIMIT, 5, id="06-unlinked-and-mapped"),
        pytest.param(ONE_FILE, ToolStatus.DISK_LIMIT, 5, id="06-one-file"),
        pytest.param(MANY_FILES, ToolStatus.DISK_LIMIT, 5, id="07-a-million-files"),
        pytest.param(FLOOD, ToolStatus.OUTPUT_LIMIT, 2, id="09-endless-output"),
        pytest.param(NO_NEWLINE, ToolStatus.OUTPUT_LIMIT, 2, id="10-no-newline"),
    ],
)
def test_more_than_its_share(run, program, status, within_s):
    result = run(program)
    assert result.status is status, result
    assert result.wall_s < within_s
    assert result.reason
    assert len(result.stdout) < 2100


def test_05_shared_memory_and_tmp_are_bounded(run):
    result = run(
        """
        import os
        for folder in ("/tmp", "/dev/shm"):
            written = 0
            try:
                with open(folder + "/mappa-hostile", "wb", buffering=0) as file:
                    while written < 64:
                        file.write(bytes(1 << 20))
                        written += 1
            except OSError:
                pass
            print(written)
        """
    )
    assert result.status is ToolStatus.OK
    assert all(int(written) <= 4 for written in result.stdout.split())


def test_11_output_that_is_no_text(run):
    result = run(
        r"""
        import os
        os.write(1, b"a\xff\x00\x1b[31mb\x1b]0;title\x07\x9b\xed\xa0\x80c\r\n")
        """
    )
    assert result.status is ToolStatus.OK
    assert result.stdout == "a\ufffdb" + "\ufffd" * 4 + "c\n"


@pytest.mark.parametrize(
    "program",
    [
        pytest.param("while True: pass", id="12-endless"),
        pytest.param("import re\nre.match('(a+)+b', 'a' * 40)", id="13-endless-in-c"),
        pytest.param("x = 7 ** (10 ** 9)", id="13-huge-number"),
        pytest.param(
            "import signal, time\n"
            "for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP): signal.signal(number, signal.SIG_IGN)\n"
            "time.sleep(60)",
            id="14-ignores-signals",
        ),
        pytest.param("import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()", id="15-thread"),
    ],
)
def test_longer_than_its_time(run, program):
    begin = time.monotonic()
    result = run("print('begun')\n" + program, wall_s=0.3)
    assert (result.status, result.stdout) == (ToolStatus.TIMEOUT, "begun\n")
    assert 0.3 <= result.wall_s < 0.8
    assert time.monotonic() - begin < 5
