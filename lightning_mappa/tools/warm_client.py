"""Stands for one run of a `warm_server` outside its sandbox, as a process that starts, ends and can be killed.

Arguments: the descriptors of the connection and of the status pipe, the workspace. It hands over the workspace and
where its output goes, and ends as the run does: with its exit code, or by SIGKILL where the run is lost. Its own
death ends the run.
"""

import _socket  # `socket` takes as long to import as Python to start
import array
import ctypes
import os
import signal
import struct
import sys

CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000
OPEN_TREE, OPEN_TREE_CLONE, AT_SYMLINK_NOFOLLOW, AT_FDCWD = 428, 1, 0x100, -100
CREDENTIALS = struct.Struct("3i")


def detached_mount(folder: str) -> int:
    """A mount of the folder that is on no path, to be moved to one in another namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    if os.geteuid() != 0 and libc.unshare(CLONE_NEWUSER | CLONE_NEWNS) == -1:
        raise OSError(ctypes.get_errno(), "unshare")
    flags = OPEN_TREE_CLONE | os.O_CLOEXEC | AT_SYMLINK_NOFOLLOW
    descriptor = libc.syscall(OPEN_TREE, AT_FDCWD, os.fsencode(folder), flags)
    if descriptor == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), folder)
    return int(descriptor)


def take_along(pid: int) -> None:
    """Moves a process into the memory group of this one, where that is one made for the run."""
    with open("/proc/self/cgroup") as groups, open("/proc/self/mounts") as mounts:
        paths = [path for line in groups if "/mappa-" in (path := line.rstrip().split(":", 2)[2])]
        folders = [fields[1] for line in mounts if (fields := line.split())[2] in ("cgroup", "cgroup2")]
    for path in paths:
        # In a container the path may begin above what is mounted.
        places = [f"{folder}{inner}" for folder in folders for inner in (path, "/" + path.rsplit("/", 1)[1])]
        place = next(place for place in places if os.path.isdir(place))
        with open(f"{place}/cgroup.procs", "w") as processes:
            processes.write(str(pid))


def main(connection_fd: str, status_fd: str, workspace: str) -> None:
    connection = _socket.socket(fileno=int(connection_fd))
    mount = detached_mount(workspace)
    message, ancillary, _, _ = connection.recvmsg(1 << 12, _socket.CMSG_SPACE(CREDENTIALS.size))
    if message != b"first":
        os.write(2, message or b"the warm interpreter died")
        os._exit(1)
    pid, _, _ = CREDENTIALS.unpack(ancillary[0][2])  # as this process's namespace calls the sender
    take_along(pid)
    os.write(int(status_fd), b'{"child-pid": %d}\n' % pid)
    rights = (_socket.SOL_SOCKET, _socket.SCM_RIGHTS, array.array("i", [1, 2, mount]))
    connection.sendmsg([b"1"], [rights])
    message = connection.recv(1 << 12)
    if not message:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        code = int(message)
    except ValueError:  # what kept the program from beginning
        os.write(2, message)
        code = 1
    os._exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main(*sys.argv[1:])
