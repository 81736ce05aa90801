"""Runs inside a sandbox of its own, where this package is not: its text is given to `python -c`, to be a module
beside `__main__`, which is the program's.

Arguments of `run`: the control descriptor, the launcher's text, the folders of installed packages joined by `:`,
then the modules to import. It imports them once and then forks, for every request on the control socket:

    server -> first process (pid 1 in namespaces of the run's own) -> program (pid 2)

Nothing that has a capability reads a byte of the program's making, but for its text, which is copied. The program's
process gives capabilities and descriptors up for good before the program begins. The server, pid 1 itself,
ends with its control socket and ends all runs; the first process ends with the run's connection and ends the run.
"""

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import io
import json
import os
import select
import shutil
import signal
import socket
import struct
import sys
import threading
import types
from typing import Any

CLONE_NEW = 0x00020000 | 0x04000000 | 0x08000000 | 0x20000000 | 0x40000000  # mounts, uts, ipc, pid, net
CLONE_NEWUSER = 0x10000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 8, 4096, 16384, 1 << 18
MOVE_MOUNT, MOVE_MOUNT_F_EMPTY_PATH, AT_FDCWD = 429, 4, -100
MOUNT_SETATTR = 442
PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 4, 22, 24, 38
PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 47, 4
SECCOMP_MODE_FILTER = 2
CAPABILITY_VERSION = 0x20080522
SIOCSIFFLAGS, IFF_UP = 0x8914, 1
WORKSPACE, PROGRAM = "/ws", "/program.py"
DESCRIPTORS = 3
"""Of a request: its connection, its status pipe, the program's text. From the client come three more: where output
and errors go, and the workspace, as a mount on no path yet."""

libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: "int | bytes | None") -> None:
    """Of libc. Raises OSError where it returns -1."""
    function = getattr(libc, name)
    function.restype = ctypes.c_long
    if function(*(ctypes.c_long(a) if isinstance(a, int) else a for a in arguments)) == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def preload(modules: "tuple[str, ...]") -> str:
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


def serve(control: socket.socket) -> "tuple[dict[str, Any], list[int]]":
    """Returns in a fork, for each request that arrives. Ends with the control socket."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    gc.collect()
    gc.freeze()  # a collection in a program would copy every page of the imported modules
    while True:
        request, descriptors, _, _ = socket.recv_fds(control, 1 << 16, DESCRIPTORS)
        if not request:
            os._exit(0)
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            control.close()
            return json.loads(request), descriptors
        for descriptor in descriptors:
            os.close(descriptor)


def enter_namespaces(owner: "int | None") -> None:
    """New ones, as their first process: the calling one ends. Without the right to, within a user namespace."""
    user, group = os.getuid(), os.getgid()
    call("unshare", CLONE_NEW if owner is not None else CLONE_NEW | CLONE_NEWUSER)
    if owner is None:
        for file, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{file}", "w") as map_file:
                map_file.write(text)
    if os.fork():
        os._exit(0)
    call("prctl", PR_SET_DUMPABLE, 0, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # which does not reach a namespace's first process
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        fcntl.ioctl(sock, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP))


def begin(connection: socket.socket) -> "list[int]":
    """Forks the program and returns there, with where it writes to."""
    connection.send(b"first")
    message, (*outputs, workspace), _, _ = socket.recv_fds(connection, 1, 3)
    if not message:  # else whoever started the run can end this process, and with it the run
        os._exit(1)
    call("syscall", MOVE_MOUNT, workspace, b"", AT_FDCWD, WORKSPACE.encode(), MOVE_MOUNT_F_EMPTY_PATH)
    restrict(WORKSPACE, MS_NOSUID | MS_NODEV)
    program = os.fork()
    if program == 0:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        return outputs
    try:
        close_all_but(connection.fileno())
        drop_capabilities()
        connection.send(b"%d" % exit_code(program, connection))
    finally:
        os._exit(0)


def exit_code(program: int, connection: socket.socket) -> int:
    """Waits for the program, reaps orphans meanwhile. Raises ConnectionError when the connection ends before it."""
    reader, writer = os.pipe2(os.O_NONBLOCK)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    poll = select.poll()
    poll.register(reader, select.POLLIN)
    poll.register(connection, 0)  # its end is reported without being asked for
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == program:
            return os.waitstatus_to_exitcode(status)
        if pid == 0:
            if connection.fileno() in dict(poll.poll()):
                raise ConnectionError
            os.read(reader, 1 << 12)


def mount_files(program: int, tmp_bytes: int) -> None:
    """Over the server's files: /proc of the new namespace, empty folders in memory, the program."""
    options = b"size=%d,mode=1777" % tmp_bytes
    call("mount", None, b"/", None, MS_REC | MS_PRIVATE, None)
    call("mount", b"proc", b"/proc", b"proc", MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC, None)
    call("mount", b"tmpfs", b"/tmp", b"tmpfs", MS_NOSUID | MS_NODEV, options)
    call("mount", b"tmpfs", b"/dev/shm", b"tmpfs", MS_NOSUID | MS_NODEV, options)
    terminals = b"newinstance,ptmxmode=0666,mode=620"
    call("mount", b"devpts", b"/dev/pts", b"devpts", MS_NOSUID | MS_NOEXEC, terminals)
    with open(program, "rb", closefd=False) as source, open("/tmp/program", "xb") as copy:
        os.fchmod(copy.fileno(), 0o444)
        shutil.copyfileobj(source, copy)
    call("mount", b"/tmp/program", PROGRAM.encode(), None, MS_BIND, None)
    restrict(PROGRAM, MS_RDONLY | MS_NOSUID | MS_NODEV)
    os.unlink("/tmp/program")


def restrict(path: str, flags: int) -> None:
    """Adds to what may not be done through a mount. Here the flags are the same as those of mount itself."""
    attributes = struct.pack("=4Q", flags, 0, 0, 0)
    call("syscall", MOUNT_SETATTR, AT_FDCWD, path.encode(), 0, attributes, len(attributes))


def give_up(request: "dict[str, Any]", outputs: "list[int]", status: int, launcher: types.ModuleType) -> None:
    """The program's process takes on limits and filter, and gives up its rights and all descriptors but three."""
    for number, descriptor in enumerate(outputs, start=1):
        os.dup2(descriptor, number)
    os.setsid()
    if (random := sys.modules.get("numpy.random")) is not None:
        random.seed()  # else every program would draw the same numbers
    code = ctypes.create_string_buffer(bytes.fromhex(request["filter"]))
    count = (len(code) - 1) // 8
    launcher.take_limits(request["limits"])
    capability = 0
    while libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) == 0:
        capability += 1
    if (owner := request["owner"]) is not None:
        os.setgroups([])
        os.setresgid(owner, owner, owner)
        os.setresuid(owner, owner, owner)
    os.chdir(WORKSPACE)
    drop_capabilities()
    call("prctl", PR_SET_DUMPABLE, 1, 0, 0, 0)  # its own /proc/self is its own to read
    call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    call("prctl", PR_SET_SECCOMP, SECCOMP_MODE_FILTER, struct.pack("HP", count, ctypes.addressof(code)), 0, 0)
    os.write(status, b"ready\n")
    os.closerange(3, 1 << 16)


def drop_capabilities() -> None:
    call("prctl", PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    call("capset", struct.pack("=Ii", CAPABILITY_VERSION, 0), bytes(24))


def close_all_but(kept: int) -> None:
    """Descriptors; 1 and 2 become what 0 is, an empty file."""
    os.dup2(0, 1)
    os.dup2(0, 2)
    os.closerange(3, kept)
    os.closerange(kept + 1, 1 << 16)


def leave(code: object) -> None:
    """Ends the program's process as the interpreter would, but for the taking apart of the imported modules.

    That would copy their pages, which takes longer than all the rest.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    names = vars(sys.modules["__main__"])
    for name in [name for name in names if not name.startswith("__")]:
        names[name] = None
    gc.collect()
    for thing in gc.get_objects():
        if issubclass(type(thing), io.IOBase):
            with contextlib.suppress(Exception):
                thing.flush()
    libc.fflush(None)
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    os._exit((code or 0) & 0xFF)


def run(control_fd: str, launcher_text: str, packages: str, *modules: str) -> None:
    """Never returns, in whatever process."""
    launcher = types.ModuleType("launcher")
    exec(launcher_text, vars(launcher))
    launcher.add_site(packages)
    control = socket.socket(fileno=int(control_fd))
    fault = preload(modules)
    control.send(fault.encode()[: 1 << 12] or b"ready")
    if fault:
        sys.exit(1)
    request, descriptors = serve(control)
    connection = socket.socket(fileno=descriptors[0])
    try:
        _, status, program = descriptors
        enter_namespaces(request["owner"])
        mount_files(program, request["tmp_bytes"])
        outputs = begin(connection)
        give_up(request, outputs, status, launcher)
    except BaseException as error:
        with contextlib.suppress(OSError):
            connection.send(f"{type(error).__name__}: {error}".encode())
        os._exit(1)
    connection.detach()  # is closed
    try:
        launcher.become(PROGRAM)
    except SystemExit as end:
        leave(end.code)
    leave(0)
