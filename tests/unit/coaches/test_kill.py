"""Killed in the middle of paid calls: real processes, a real server that counts, and SIGKILL."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from lightning_mappa.coaches.guard import LOG, BudgetGuard
from tests.unit.coaches import paying_process
from tests.unit.coaches.calls import PRICES
from tests.unit.coaches.paying_process import CALLS, IN_FLIGHT

KEY = "sk-test-0123456789abcdef"
CALL_USD = 0.0015
"""1000 tokens in and 100 out."""


class PaidServer(ThreadingHTTPServer):
    """Bills every request that reaches it. No two replies are alike."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.billed = 0
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/"


class _Handler(BaseHTTPRequestHandler):
    server: PaidServer

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        assert self.headers["x-api-key"] == KEY
        with self.server.lock:
            self.server.billed += 1
            number = self.server.billed
        time.sleep(0.01 + 0.005 * (number % 5))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(f"reply {number}".encode())

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[PaidServer]:
    with PaidServer() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def start(folder: Path, server: PaidServer, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", paying_process.__name__, str(folder), server.url, *more]
    environment = {**os.environ, "COACH_API_KEY": KEY}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def booked(folder: Path) -> dict[str, Any]:
    guard = BudgetGuard(model="m", prices={"m": PRICES}, budget_usd=1.0)
    guard.bind(folder)
    return guard.summary()


def used(output: str) -> dict[int, str]:
    """Question to reply, for the replies that the process came to use."""
    return dict(json.loads(line) for line in output.splitlines(keepends=True) if line.endswith("\n"))


@pytest.mark.parametrize("kill_after", [20, 50, 85])
def test_a_killed_run_pays_again_at_most_for_what_was_in_flight(tmp_path, server, kill_after):
    process = start(tmp_path, server)
    while server.billed < kill_after:
        assert process.poll() is None
        time.sleep(0.001)
    process.kill()
    before = used(process.communicate()[0])
    time.sleep(0.1)  # Requests that had left the process reach the server.
    billed = server.billed
    assert kill_after <= billed < CALLS
    assert len(before) > 0
    # Whatever the server bills is in the books, that which has no answer at the most it can cost.
    figures = booked(tmp_path)
    assert billed <= figures["calls"] <= billed + IN_FLIGHT
    assert 0 < figures["calls_lost_in_flight"] <= IN_FLIGHT
    assert figures["usd"] >= billed * CALL_USD

    resumed = start(tmp_path, server)
    after = used(resumed.communicate()[0])
    assert resumed.returncode == 0
    assert len(after) == CALLS
    assert server.billed <= CALLS + IN_FLIGHT
    assert before.items() <= after.items()  # What had been used is what is used again.
    assert booked(tmp_path)["calls_lost_in_flight"] == figures["calls_lost_in_flight"]
    assert booked(tmp_path)["usd"] >= server.billed * CALL_USD

    again = start(tmp_path, server)
    count = server.billed
    assert used(again.communicate()[0]) == after
    assert server.billed == count


def test_no_file_holds_the_key(tmp_path, server):
    process = start(tmp_path / "run", server, str(tmp_path / "cache"))
    output = process.communicate()[0]
    assert len(used(output)) == CALLS
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == 1 + CALLS
    assert (tmp_path / "run" / LOG) in files
    for path in files:
        assert KEY.encode() not in path.read_bytes()
