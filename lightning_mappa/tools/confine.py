"""Runs before a program where no namespace can be had; its text is given to `python -c`, as `launcher.py` is.

Arguments: a JSON object (see `landlock.py`), then the command. One process stays outside as the reaper of all that
the program starts: orphans come to it and not to the system, and it ends when none is left. Its exit code or signal
is the program's own. SIGTERM, and the death of its parent, make it kill all at once.
"""

import contextlib
import ctypes
import json
import os
import resource
import signal
import sys

PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 22, 36, 38
SECCOMP_MODE_FILTER = 2
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
ON_FILES = 0b1100_0000_0000_0111  # execute, write, read, truncate, device ioctl: all that a rule on a file may say
READ = 0b1101  # execute, read a file, list a folder
ALL = (1 << 16) - 1
DEVICE_NODES = 1 << 6 | 1 << 11  # make a character or a block device
KNOWN = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}  # rights on files that a version of Landlock tells apart
LISTED = 0b1000
WATCHED = (signal.SIGTERM, signal.SIGCHLD)

libc = ctypes.CDLL(None, use_errno=True)


class Ruleset(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class Beneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("folder", ctypes.c_int32))


class Filter(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))


def checked(result: int, what: str) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")
    return result


def prctl(option: int, *arguments: object) -> None:
    padded = [*arguments, 0, 0, 0, 0][:4]
    checked(libc.prctl(option, *(a if not isinstance(a, int) else ctypes.c_ulong(a) for a in padded)), "prctl")


def landlock_version() -> int:
    return max(0, libc.syscall(CREATE_RULESET, None, ctypes.c_size_t(0), 1))


def ruleset(read: "list[str]", listed: "list[str]", write: "list[str]") -> int:
    version = landlock_version()
    if version == 0:
        raise OSError("Landlock is not part of this kernel, or switched off")
    known = (1 << KNOWN.get(version, 16)) - 1
    # No signal to, no abstract socket of, a process outside.
    attributes = Ruleset(files=ALL & known, network=0b11 if version >= 4 else 0, scoped=0b11 if version >= 6 else 0)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    rules = checked(libc.syscall(CREATE_RULESET, ctypes.byref(attributes), ctypes.c_size_t(size), 0), "ruleset")
    for rights, paths in ((READ, read), (LISTED, listed), (ALL & ~DEVICE_NODES, write)):
        for path in paths:
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
            allowed = rights & known & (ALL if os.path.isdir(path) else ON_FILES)
            rule = Beneath(allowed=allowed, folder=descriptor)
            checked(libc.syscall(ADD_RULE, rules, 1, ctypes.byref(rule), 0), path)
            os.close(descriptor)
    return rules


def confine(spec: dict) -> None:
    os.setsid()
    rules = ruleset(spec["read"], spec["listed"], spec["write"])
    if spec["uid"] is not None:
        os.setgroups([])
        os.setresgid(spec["uid"], spec["uid"], spec["uid"])
        os.setresuid(spec["uid"], spec["uid"], spec["uid"])
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # after the change of user, which forgets it
    os.chdir(spec["folder"])
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    checked(libc.syscall(RESTRICT_SELF, rules, 0), "restrict")
    os.close(rules)
    code = bytes.fromhex(spec["filter"])
    buffer = ctypes.create_string_buffer(code, len(code))
    program = Filter(length=len(code) // 8, instructions=ctypes.addressof(buffer))
    prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program))


def start(spec: dict, command: "list[str]") -> int:
    child = os.fork()
    if child:
        return child
    try:
        confine(spec)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED)
        try:
            os.execv(command[0], command)
        except OSError as error:
            raise OSError(error.errno, error.strerror, command[0]) from None
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
    os._exit(126)


def wait(child: int) -> "int | None":
    """The wait status of the program; None when told to stop. Orphans are reaped on the way."""
    while signal.sigwait(WATCHED) == signal.SIGCHLD:
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == child:
                return status
            if pid == 0:
                break
    return None


def family() -> "list[int]":
    found, pending = [], [os.getpid()]
    while pending:
        pid = pending.pop()
        try:
            for thread in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{thread}/children") as file:
                    children = [int(number) for number in file.read().split()]
                found += children
                pending += children
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def sweep() -> None:
    """Stops all, so that none can go on forking; then kills, until no child is left to wait for."""
    stopped: set = set()
    while new := set(family()) - stopped:
        for pid in new:
            send(pid, signal.SIGSTOP)
        stopped |= new
    while True:
        living = family()
        for pid in living:
            send(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0 if living else os.WNOHANG)
        except ChildProcessError:
            return


def main() -> None:
    spec = json.loads(sys.argv[1])
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != spec["parent"]:
        return
    child = start(spec, sys.argv[2:])
    os.closerange(3, 256)
    status = wait(child)
    sweep()
    if status is not None and os.WIFEXITED(status):
        os._exit(os.WEXITSTATUS(status))
    number = signal.SIGKILL if status is None else os.WTERMSIG(status)
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)


if __name__ == "__main__":
    main()
