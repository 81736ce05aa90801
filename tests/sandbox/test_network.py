"""Programs that want to reach a service, or to be one."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from pathlib import Path

from lightning_mappa.types import ToolStatus


def test_31_nothing_is_reached(run, harness):
    path = str(harness.outside.parent / "socket")
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp,
        socket.socket(socket.AF_UNIX) as abstract,
        socket.socket(socket.AF_UNIX) as named,
        contextlib.ExitStack() as stack,
    ):
        stack.callback(Path(path).unlink)
        udp.bind(("127.0.0.1", 0))
        abstract.bind(f"\0mappa-test-{os.getpid()}")
        abstract.listen()
        named.bind(path)
        os.chmod(path, 0o777)
        named.listen()
        result = run(
            f"""
            import socket
            for family, kind, address in (
                (socket.AF_INET, socket.SOCK_STREAM, {tcp.getsockname()!r}),
                (socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 8265)),
                (socket.AF_INET, socket.SOCK_STREAM, ("169.254.169.254", 80)),
                (socket.AF_INET6, socket.SOCK_STREAM, ("::1", {tcp.getsockname()[1]})),
                (socket.AF_INET, socket.SOCK_DGRAM, {udp.getsockname()!r}),
                (socket.AF_INET, socket.SOCK_DGRAM, ("1.1.1.1", 53)),
                (socket.AF_UNIX, socket.SOCK_STREAM, {abstract.getsockname()!r}),
                (socket.AF_UNIX, socket.SOCK_STREAM, {path!r}),
                (socket.AF_INET, socket.SOCK_RAW, None),
                (socket.AF_NETLINK, socket.SOCK_RAW, None),
                (socket.AF_PACKET, socket.SOCK_RAW, None),
                (40, socket.SOCK_STREAM, None),
            ):
                try:
                    with socket.socket(family, kind) as sock:
                        sock.settimeout(0.3)
                        if address is not None:
                            sock.connect(address)
                            sock.send(b"mappa")
                            if address[0] != "127.0.0.1" or kind == socket.SOCK_STREAM:
                                sock.recv(1)
                            else:
                                continue
                except OSError:
                    continue
                print("reached", family, kind, address)
            try:
                print(socket.getaddrinfo("example.com", 80))
            except OSError:
                pass
            """
        )
        assert (result.status, result.stdout) == (ToolStatus.OK, ""), result
        udp.setblocking(False)
        tcp.setblocking(False)
        for server, take in ((udp, lambda: udp.recv(9)), (tcp, tcp.accept)):
            try:
                take()
            except BlockingIOError:
                continue
            raise AssertionError(f"{server} was reached")


def test_32_a_server_is_not_seen_outside(run):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    reached, end = [], threading.Event()

    def connect():
        while not end.is_set():
            try:
                socket.create_connection(("127.0.0.1", port), timeout=0.1).close()
            except OSError:
                time.sleep(0.02)
            else:
                reached.append(port)

    thread = threading.Thread(target=connect)
    thread.start()
    result = run(
        f"""
        import socket, time
        try:
            with socket.create_server(("127.0.0.1", {port})):
                time.sleep(0.3)
        except OSError:
            print("denied")
        """
    )
    end.set()
    thread.join()
    assert result.status is ToolStatus.OK, result
    assert reached == []


def test_33_standard_input_is_at_its_end(run):
    assert run("import sys; print(repr(sys.stdin.read()))").stdout == "''\n"
