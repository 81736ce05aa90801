"""Runs inside a sandbox of its own, where this package is not: its text is given to `python -c`.

Arguments: the control descriptor, the launcher's text, the folders of installed packages joined by `:`, then the
modules to import. It imports them once and then forks: for every connection that comes over the control socket a
keeper, which makes new namespaces and in them a first process, which prepares files and starts the program's.

    server -> keeper -> first process (pid 1, pid namespace of the run) -> program (pid 2)

The three to the left have capabilities and never touch a byte of the program's making; the fourth gives all
capabilities and descriptors up for good before the program begins. Everything dies downward: the server with its
control socket, the first process with the connection or the keeper, all of the run with the first process.
"""

import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import select
import shutil
import signal
import socket
import struct
import sys
import types
from typing import Any

CLONE_NEW = 0x00020000 | 0x04000000 | 0x08000000 | 0x20000000 | 0x40000000  # mounts, uts, ipc, pid, net
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18
MNT_DETACH = 2
MOVE_MOUNT, MOVE_MOUNT_F_EMPTY_PATH, AT_FDCWD = 429, 4, -100
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 24, 38
PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 47, 4
SECCOMP_MODE_FILTER = 2
CAPABILITY_VERSION = 0x20080522
SIOCSIFFLAGS, IFF_UP = 0x8914, 1
WORKSPACE, PROGRAM = "/ws", "/program.py"
DESCRIPTORS = 5
"""Of a run: where its output, its errors and its status go, its text, its workspace as a mount on no path yet."""

libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: "int | bytes | None") -> None:
    """Of libc. Raises OSError where it returns -1."""
    function = getattr(libc, name)
    function.restype = ctypes.c_long
    if function(*(ctypes.c_long(a) if isinstance(a, int) else a for a in arguments)) == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def preload(modules: "list[str]") -> str:
    """Imports; returns in a sentence why no program may be forked from the result, or an empty one."""
    before = os.listdir("/proc/self/fd")
    for name in modules:
        try:
            importlib.import_module(name)
        except BaseException as error:
            return f"`import {name}` failed: {type(error).__name__}: {error}"
    if len(os.listdir("/proc/self/task")) > 1:
        return "the imported modules started threads"
    if os.listdir("/proc/self/fd") != before:
        return "the imported modules hold files open"
    with open("/proc/self/maps") as maps:
        if any(line.split()[1].startswith("rw-s") for line in maps):
            return "the imported modules share writable memory"
    return ""


def serve(control: socket.socket) -> socket.socket:
    """Forks for each connection that arrives, and returns it in the fork; ends with the control socket."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps keepers
    gc.collect()
    gc.freeze()  # a collection in a program would copy every page of the imported modules
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            os._exit(0)
        connection = socket.socket(fileno=descriptors[0])
        if os.fork() == 0:
            control.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return connection
        connection.close()


def keep(connection: socket.socket) -> "tuple[dict[str, Any], list[int]]":
    """Receives the request and makes the namespaces; returns in their first process, never in the keeper."""
    message, descriptors, _, _ = socket.recv_fds(connection, 1 << 16, DESCRIPTORS)
    if not message:
        os._exit(1)
    os.dup2(descriptors[1], 2)  # where it is told what fails from here on
    call("unshare", CLONE_NEW)
    first = os.fork()
    if first == 0:
        return json.loads(message), descriptors
    close_all_but(connection.fileno())
    first_fd = os.pidfd_open(first)
    poll = select.poll()
    poll.register(first_fd, select.POLLIN)
    poll.register(connection, 0)  # its end is reported without being asked for
    if first_fd not in dict(poll.poll()):
        os.kill(first, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(first, 0)[1])
    with contextlib.suppress(OSError):
        connection.send(str(code).encode())
    os._exit(0)


def begin(connection: socket.socket, request: "dict[str, Any]", descriptors: "list[int]") -> None:
    """The first process: prepares, forks the program, waits for it. Returns in the program only."""
    call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL)
    call("prctl", PR_SET_DUMPABLE, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # which does not reach a namespace's first process
    mount_files(descriptors[3], descriptors[4], request["tmp_bytes"])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        fcntl.ioctl(sock, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP))
    connection.send(b"first")
    if not connection.recv(1):  # the answer: whoever started the run can end this process, and with it the run
        os._exit(1)
    program = os.fork()
    if program == 0:
        return
    close_all_but()
    while True:
        pid, status = os.wait()
        if pid == program:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


def mount_files(program: int, workspace: int, tmp_bytes: int) -> None:
    """Over the server's files: /proc of the new namespace, empty folders in memory, the program, the workspace."""
    options = b"size=%d,mode=1777" % tmp_bytes
    call("mount", None, b"/", None, MS_REC | MS_PRIVATE, None)
    call("umount2", b"/proc", MNT_DETACH)
    call("mount", b"proc", b"/proc", b"proc", MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC, None)
    call("mount", b"tmpfs", b"/tmp", b"tmpfs", MS_NOSUID | MS_NODEV, options)
    call("mount", b"tmpfs", b"/dev/shm", b"tmpfs", MS_NOSUID | MS_NODEV, options)
    terminals = b"newinstance,ptmxmode=0666,mode=620"
    call("mount", b"devpts", b"/dev/pts", b"devpts", MS_NOSUID | MS_NOEXEC, terminals)
    with open(program, "rb", closefd=False) as source, open("/tmp/program", "xb") as copy:
        os.fchmod(copy.fileno(), 0o444)
        shutil.copyfileobj(source, copy)
    remount = MS_REMOUNT | MS_BIND | MS_NOSUID | MS_NODEV
    call("mount", b"/tmp/program", PROGRAM.encode(), None, MS_BIND, None)
    call("mount", None, PROGRAM.encode(), None, remount | MS_RDONLY, None)
    os.unlink("/tmp/program")
    call("syscall", MOVE_MOUNT, workspace, b"", AT_FDCWD, WORKSPACE.encode(), MOVE_MOUNT_F_EMPTY_PATH)
    call("mount", None, WORKSPACE.encode(), None, remount, None)


def give_up(request: "dict[str, Any]", descriptors: "list[int]", launcher: types.ModuleType) -> None:
    """The program's process takes on limits and filter, and gives up its rights and all descriptors but three."""
    stdout, stderr, status, _, _ = descriptors
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    os.setsid()
    if (random := sys.modules.get("numpy.random")) is not None:
        random.seed()  # else every program would draw the same numbers
    code = ctypes.create_string_buffer(bytes.fromhex(request["filter"]))
    count = (len(code) - 1) // 8
    launcher.take_limits(request["limits"])
    capability = 0
    while libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) == 0:
        capability += 1
    owner = request["owner"]
    os.setgroups([])
    os.setresgid(owner, owner, owner)
    os.setresuid(owner, owner, owner)
    os.chdir(WORKSPACE)
    call("prctl", PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    call("capset", struct.pack("=Ii", CAPABILITY_VERSION, 0), bytes(24))
    call("prctl", PR_SET_DUMPABLE, 1, 0, 0, 0)  # its own /proc/self is its own to read
    call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    call("prctl", PR_SET_SECCOMP, SECCOMP_MODE_FILTER, struct.pack("HP", count, ctypes.addressof(code)), 0, 0)
    os.write(status, b"ready\n")
    os.closerange(3, 1 << 16)


def close_all_but(*kept: int) -> None:
    """Descriptors; 1 and 2 become what 0 is, an empty file."""
    os.dup2(0, 1)
    os.dup2(0, 2)
    edges = [2, *sorted(kept), 1 << 16]
    for lower, upper in zip(edges, edges[1:], strict=False):
        os.closerange(lower + 1, upper)


def main(control_fd: str, launcher_text: str, packages: str, *modules: str) -> types.ModuleType:
    """Returns the launcher, in the processes of programs only."""
    launcher = types.ModuleType("launcher")
    exec(launcher_text, vars(launcher))
    launcher.add_site(packages)
    control = socket.socket(fileno=int(control_fd))
    fault = preload(list(modules))
    control.send(fault.encode()[: 1 << 12] or b"ready")
    if fault:
        sys.exit(1)
    connection = serve(control)
    try:
        request, descriptors = keep(connection)
        begin(connection, request, descriptors)
        connection.close()
        give_up(request, descriptors, launcher)
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
        os._exit(1)
    return launcher


if __name__ == "__main__":
    main(*sys.argv[1:]).become("/program.py")
