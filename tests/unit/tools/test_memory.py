"""Limits that hold for all processes of a program together, against real processes."""

import mmap
import os
import subprocess
import sys

import pytest

from lightning_mappa.tools.cgroup import memory_group
from lightning_mappa.tools.memory import family, holds_more_than, unlinked_bytes

MIB = 1 << 20
HOLDS = "import sys, time; x = bytearray(b'x') * (60 << 20); print('held', flush=True); sys.stdin.read()"
SHARES = (
    "import os, sys, time; x = bytearray(b'x') * (60 << 20)\n"
    "for _ in range(3):\n    if os.fork() == 0: time.sleep(60)\n"
    "print('held', flush=True); sys.stdin.read(); os.killpg(0, 9)"
)


@pytest.mark.parametrize("program", [HOLDS, SHARES])
def test_pages_shared_after_a_fork_count_once(program):
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None
    assert process.stdin is not None
    process.stdout.readline()
    assert len(list(family(process.pid))) == (1 if program is HOLDS else 4)
    assert holds_more_than(process.pid, 60 * MIB)
    assert not holds_more_than(process.pid, 100 * MIB)
    process.stdin.close()
    process.wait()


def test_of_a_dead_process_nothing_is_held():
    assert not holds_more_than(2**22 + 1, 0)


def test_files_without_a_name_count_as_long_as_they_are_held(tmp_path):
    device, before = os.stat(tmp_path).st_dev, unlinked_bytes(os.getpid(), os.stat(tmp_path).st_dev)
    with open(tmp_path / "open", "wb", buffering=0) as file:
        file.write(bytes(MIB))
        assert unlinked_bytes(os.getpid(), device) == before
        os.unlink(tmp_path / "open")
        assert unlinked_bytes(os.getpid(), device) >= before + MIB
    with open(tmp_path / "mapped", "w+b") as file:
        os.truncate(file.fileno(), MIB)
        held = mmap.mmap(file.fileno(), MIB)
    held.write(bytes(MIB))
    os.unlink(tmp_path / "mapped")
    assert unlinked_bytes(os.getpid(), device) >= before + MIB
    held.close()
    assert unlinked_bytes(os.getpid(), device) == before


def test_the_kernel_keeps_the_limit_of_a_group_and_the_group_is_removed():
    with memory_group(64 * MIB) as group:
        if group is None:
            pytest.skip("no control group for memory can be made here")
        assert not group.was_exceeded()
        argv = group.enter([sys.executable, "-c", "x = b'x' * (200 << 20)"])
        assert subprocess.run(argv).returncode == -9
        assert group.was_exceeded()
    assert not group.path.exists()
