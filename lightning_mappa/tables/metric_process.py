"""The process that computes metrics: the only one of ours that imports scikit-learn while a run goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from lightning_mappa.errors import ConfigError, InfrastructureError
from lightning_mappa.tables import metrics

_TEXT = Path(metrics.__file__).read_text(encoding="utf-8")
_ENVIRONMENT = {"PATH": os.defpath, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


class MetricProcess:
    """Starts at the first use, lives until it is closed, and serves one question at a time. Thread-safe.

    It is given cells that a strict reader has taken apart, as JSON, and never a file that a program wrote.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def measure(self, arguments: Mapping[str, Any]) -> dict[str, float]:
        """`metrics.measure(**arguments)`.

        Raises:
            ConfigError: scikit-learn is not installed.
            InfrastructureError: the process died or failed; the next call starts another one.
        """
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._process = self._start()
            reply = self._ask(self._process, json.dumps(dict(arguments)))
        if "error" in reply:
            raise InfrastructureError(f"the process that computes metrics failed: {reply['error']}")
        found: dict[str, float] = reply["metrics"]
        return found

    def close(self) -> None:
        with self._lock:
            if self._process is not None:
                _end(self._process)
                self._process = None

    def _start(self) -> subprocess.Popen[str]:
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-c", _TEXT],
                env=_ENVIRONMENT,
                cwd="/",
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                encoding="utf-8",
                start_new_session=True,
            )
        except OSError as error:
            raise InfrastructureError(f"the process that computes metrics cannot be started: {error}") from error
        weakref.finalize(self, _end, process)
        if not _pipe(process.stdout).readline():
            said = _pipe(process.stderr).read()
            _end(process)
            if "ModuleNotFoundError" in said:
                raise ConfigError("task: scoring tables needs scikit-learn; pip install 'lightning-mappa[tabular]'")
            raise InfrastructureError(f"the process that computes metrics did not start: {said.strip()[-300:]}")
        return process

    def _ask(self, process: subprocess.Popen[str], line: str) -> dict[str, Any]:
        try:
            stdin = _pipe(process.stdin)
            stdin.write(line + "\n")
            stdin.flush()
            told = _pipe(process.stdout).readline()
        except OSError:
            told = ""
        if not told:
            _end(process)
            self._process = None
            raise InfrastructureError(f"the process that computes metrics died, exit code {process.returncode}")
        reply: dict[str, Any] = json.loads(told)
        return reply


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None and not pipe.closed:
            try:
                pipe.close()
            except OSError:  # bytes that nobody will read
                continue
