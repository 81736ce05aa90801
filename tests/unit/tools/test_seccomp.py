"""The filter as the kernel applies it to a real process; on other machines, as an interpreter of it reads it."""

import errno
import platform
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_mappa.errors import ConfigError
from lightning_mappa.tools import seccomp

ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
ALLOWED = 0x7FFF0000

CONFINED = """
import ctypes, os, sys
program = sys.stdin.buffer.read()
libc = ctypes.CDLL(None, use_errno=True)
buffer = ctypes.create_string_buffer(program)
class Program(ctypes.Structure):
    _fields_ = [("len", ctypes.c_ushort), ("filter", ctypes.c_void_p)]
assert libc.prctl(38, 1, 0, 0, 0) == 0
fprog = Program(len(program) // 8, ctypes.addressof(buffer))
assert libc.prctl(22, 2, ctypes.byref(fprog), 0, 0) == 0, os.strerror(ctypes.get_errno())
def call(number, *arguments):
    ctypes.set_errno(0)
    result = libc.syscall(number, *arguments)
    return ctypes.get_errno() if result == -1 else 0
"""


def confined(filter_: bytes, code: str) -> list[str]:
    done = subprocess.run([sys.executable, "-I", "-c", CONFINED + code], input=filter_, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode().split()


@pytest.mark.skipif(platform.machine() not in ARCH, reason="the filter is for x86_64 and aarch64")
@pytest.mark.parametrize("shared", [False, True])
def test_the_kernel_refuses_what_is_listed(shared):
    column = list(ARCH).index(platform.machine())
    tables = seccomp._ESCAPES | (seccomp._SHARED if shared else {})
    numbers = [call[column] for call in tables.values() if call[column] is not None]
    # Arguments for which no call does harm, should it get through.
    told = confined(
        seccomp.seccomp_filter(shared=shared), f"for number in {numbers}: print(call(number, -1, -1, -1, -1, -1))"
    )
    assert told == [str(errno.EPERM)] * len(numbers)


@pytest.mark.skipif(platform.machine() not in ARCH, reason="the filter is for x86_64 and aarch64")
def test_the_kernel_lets_ordinary_programs_be():
    program = """
import socket, subprocess, threading
socket.socket(socket.AF_INET).close()
socket.socket(socket.AF_UNIX).close()
threading.Thread(target=print, args=("thread",)).start()
subprocess.run(["echo", "child"])
if os.fork() == 0:
    os._exit(0)
print(os.wait()[1])
for family in (socket.AF_NETLINK, socket.AF_PACKET, getattr(socket, "AF_VSOCK", 40), 38):
    try:
        socket.socket(family, socket.SOCK_RAW)
    except OSError as error:
        print(error.errno)
"""
    told = confined(seccomp.seccomp_filter(), program)
    assert sorted(told) == sorted(["thread", "child", "0", *[str(errno.EAFNOSUPPORT)] * 4])


@pytest.mark.parametrize(
    ("column", "header"),
    [(0, "/usr/include/x86_64-linux-gnu/asm/unistd_64.h"), (1, "/usr/include/asm-generic/unistd.h")],
)
def test_numbers_are_those_of_the_kernels_headers(column, header):
    if not Path(header).exists():
        pytest.skip("no kernel headers")
    known = dict(re.findall(r"#define __NR_(\w+) (\d+)", Path(header).read_text()))
    ours = {name: call[column] for name, call in (seccomp._ESCAPES | seccomp._SHARED).items()}
    assert {name: number for name, number in ours.items() if name in known} == {
        name: int(known[name]) for name in ours if name in known
    }
    older = set(ours) - {"open_tree_attr", "file_setattr", "setxattrat", "removexattrat", "fchmodat2"}
    assert {name for name in older if ours[name] is not None} <= set(known) | {"name_to_handle_at", "open_by_handle_at"}


@pytest.mark.parametrize("machine", list(ARCH))
@pytest.mark.parametrize("shared", [False, True])
def test_each_machine_has_its_own_numbers(machine, shared):
    program = seccomp.seccomp_filter(shared=shared, machine=machine)
    column = list(ARCH).index(machine)
    read, clone, socket_, clone3, ioctl, prlimit = [
        (0, 56, 41, 435, 16, 302),
        (63, 220, 198, 435, 29, 261),
    ][column]

    def verdict(number, *arguments, arch=ARCH[machine]):
        return interpret(program, struct.pack("=IIQ6Q", number, arch, 0, *arguments, *[0] * (6 - len(arguments))))

    refused = 0x50000
    assert verdict(read) == ALLOWED
    assert verdict(read, arch=0x40000003) == 0x80000000
    assert verdict(read | 0x40000000) == refused | errno.ENOSYS
    assert verdict(clone3) == refused | errno.ENOSYS
    assert verdict(clone, 0x01200011) == ALLOWED
    assert verdict(clone, 0x10000000 | 17) == refused | errno.EPERM
    assert [verdict(socket_, family) for family in (1, 2, 10)] == [refused | errno.EPERM if shared else ALLOWED] * 3
    assert {verdict(socket_, family) for family in (0, 3, 16, 17, 38, 40)} == {
        refused | (errno.EPERM if shared else errno.EAFNOSUPPORT)
    }
    assert verdict(ioctl, 0, 0x5412) == refused | errno.EPERM
    assert verdict(ioctl, 0, 0x5401) == ALLOWED
    assert verdict(prlimit, 0) == ALLOWED
    assert verdict(prlimit, 7) == (refused | errno.EPERM if shared else ALLOWED)
    for name, call in seccomp._ESCAPES.items():
        if call[column] is not None:
            assert verdict(call[column]) == refused | errno.EPERM, name


def test_an_unknown_machine_is_refused():
    with pytest.raises(ConfigError, match="on riscv64, only on x86_64, aarch64"):
        seccomp.seccomp_filter(machine="riscv64")


def interpret(program: bytes, data: bytes) -> int:
    """The five instructions of classic BPF that the filter is made of."""
    instructions = list(struct.iter_unpack("=HBBI", program))
    at = value = 0
    while True:
        code, if_true, if_false, k = instructions[at]
        at += 1
        if code == 0x06:
            return k
        if code == 0x20:
            (value,) = struct.unpack_from("=I", data, k)
        else:
            holds = {0x15: value == k, 0x35: value >= k, 0x45: bool(value & k)}[code]
            at += if_true if holds else if_false
