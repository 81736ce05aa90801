"""Stands for one run of a `warm_server` outside its sandbox, as a process that starts, ends and can be killed.

Arguments: the descriptors of the connection and of the status pipe. It hands over its output and ends as the run
does: with its exit code, or by SIGKILL where the run is lost. Its own death ends the run.
"""

import _socket  # `socket` takes as long to import as Python to start
import array
import os
import signal
import struct
import sys

CREDENTIALS = struct.Struct("3i")


def main(connection_fd: str, status_fd: str) -> None:
    connection = _socket.socket(fileno=int(connection_fd))
    message, ancillary, _, _ = connection.recvmsg(1 << 12, _socket.CMSG_SPACE(CREDENTIALS.size))
    if message != b"first":
        os.write(2, message or b"the warm interpreter died")
        os._exit(1)
    pid, _, _ = CREDENTIALS.unpack(ancillary[0][2])  # as this process's namespace calls the sender
    os.write(int(status_fd), b'{"child-pid": %d}\n' % pid)
    rights = (_socket.SOL_SOCKET, _socket.SCM_RIGHTS, array.array("i", [1, 2]))
    connection.sendmsg([b"1"], [rights])
    message = connection.recv(1 << 12)
    try:
        code = int(message)
    except ValueError:  # what went wrong, once the program may have begun
        os.write(2, message)
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main(*sys.argv[1:])
