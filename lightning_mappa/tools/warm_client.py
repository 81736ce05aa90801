"""Stands for one run of a `warm_server` outside its sandbox, as a process that starts, ends and can be killed.

Arguments: the descriptors of the connection, the status pipe, the program's text and the workspace, then the
request. It hands over what the run needs and ends as the run does: with its exit code; by SIGKILL where the server
is lost; and its own death ends the run.
"""

import array
import ctypes
import os
import signal
import socket
import struct
import sys

PR_SET_PDEATHSIG = 1
OPEN_TREE, OPEN_TREE_CLONE, AT_EMPTY_PATH = 428, 1, 0x1000
CREDENTIALS = struct.Struct("3i")


def detached_mount(folder: int) -> int:
    """A mount of the folder that is on no path, to be moved to one in another namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = libc.syscall(OPEN_TREE, folder, b"", OPEN_TREE_CLONE | os.O_CLOEXEC | AT_EMPTY_PATH)
    if descriptor == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"open_tree: {os.strerror(number)}")
    return int(descriptor)


def main(connection_fd: str, status_fd: str, program_fd: str, workspace_fd: str, request: str) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    connection = socket.socket(fileno=int(connection_fd))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    workspace = detached_mount(int(workspace_fd))
    socket.send_fds(connection, [request.encode()], [1, 2, int(status_fd), int(program_fd), workspace])
    for descriptor in (1, 2, int(program_fd), int(workspace_fd), workspace):
        os.close(descriptor)
    message, ancillary, _, _ = connection.recvmsg(16, socket.CMSG_SPACE(CREDENTIALS.size))
    if message == b"first":
        pid, _, _ = CREDENTIALS.unpack(ancillary[0][2])  # as it is called in this process's namespace
        os.write(int(status_fd), b'{"child-pid": %d}\n' % pid)
        os.close(int(status_fd))
        connection.send(b"1")
        message = connection.recv(16)
    if not message:
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(int(message) & 0xFF)


if __name__ == "__main__":
    main(*sys.argv[1:])
