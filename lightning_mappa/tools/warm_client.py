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
    if message == b"first":
        pid, _, _ = CREDENTIALS.unpack(ancillary[0][2])  # as this process's namespace calls the sender
        os.write(int(status_fd), b'{"child-pid": %d}\n' % pid)
        os.close(int(status_fd))
        rights = (_socket.SOL_SOCKET, _socket.SCM_RIGHTS, array.array("i", [1, 2]))
        connection.sendmsg([b"1"], [rights])
        os.closerange(1, 3)
        message = connection.recv(1 << 12)
    if not message:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        code = int(message)
    except ValueError:  # an error's text
        os.write(2, message)
        code = 1
    os._exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main(*sys.argv[1:])
