r"""Answers of any mathematical form, compared by math-verify in a process of its own.

Comparing one can take for ever (`9^{9^{9^9}}`), cannot be interrupted in a thread, and can eat all memory. So it
happens in a process with limits, which is killed when time is up and started again for the next answer.
"""

from __future__ import annotations

import contextlib
import json
import re
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lightning_mappa.errors import ConfigError
from lightning_mappa.tasks.grading import boxed_answer
from lightning_mappa.tasks.verifiers import Ruling, RulingStatus

_WORKER = Path(__file__).with_name("free_form_worker.py")
_PERCENT = re.compile(r"(.+?)\s*\\?%", re.DOTALL)
_GRACE_S = 0.5
_REMEMBERED = 4096


class FreeFormVerifier:
    r"""`verifiers.Verifier` for sets such as MATH, whose answers are numbers, expressions, intervals or texts.

    Lenient by design of math-verify: a unit, `m+n=70`, `\{70\}` and `(B)` count as their content, and an interval
    equals the set of its ends. What it gets wrong by itself is settled before: only the last box counts, and
    `70\%` is 70/100 and nothing else.

    Args:
        limit_s: for one comparison, in seconds. Most take milliseconds.
        max_chars: longer answers are wrong without a look.
        memory_mb: address space of the process.

    Raises `ConfigError` where math-verify is not installed.
    """

    def __init__(self, limit_s: float = 2.0, max_chars: int = 1000, memory_mb: int = 2048) -> None:
        if find_spec("math_verify") is None:
            raise ConfigError("answers of free form need math-verify: pip install 'lightning-mappa[math]'")
        for name, value in (("limit_s", limit_s), ("max_chars", max_chars), ("memory_mb", memory_mb)):
            if not value > 0:
                raise ConfigError(f"{name}={value}: must be more than 0")
        self._limit_s = limit_s
        self._max_chars = max_chars
        self._process = _Comparer(memory_mb << 20)
        self._known: OrderedDict[tuple[str, str], Ruling] = OrderedDict()
        self._lock = threading.Lock()

    def reference(self, raw: object) -> str:
        if isinstance(raw, bool) or not isinstance(raw, (str, int, float)) or not str(raw).strip():
            raise ValueError(f"{raw!r} is not an answer in LaTeX")
        return str(raw).strip()

    def answer(self, text: str) -> str | None:
        return boxed_answer(text) or None

    def grade(self, answer: str | None, reference: str) -> Ruling:
        if answer is None:
            return Ruling(status=RulingStatus.NO_ANSWER)
        if "".join(answer.split()) == "".join(reference.split()):
            return Ruling(status=RulingStatus.RIGHT)
        if len(answer) > self._max_chars:
            return Ruling(status=RulingStatus.TOO_LONG, detail=f"{len(answer)} characters, more than {self._max_chars}")
        with self._lock:
            if (answer, reference) not in self._known:
                grade = self._process.compare(_fraction(reference), _fraction(answer), self._limit_s)
                if grade.status is RulingStatus.UNAVAILABLE:
                    return grade
                self._known[answer, reference] = grade
                while len(self._known) > _REMEMBERED:
                    self._known.popitem(last=False)
            return self._known[answer, reference]

    def close(self) -> None:
        self._process.stop()


def _fraction(text: str) -> str:
    percent = _PERCENT.fullmatch(text.strip().strip("$"))
    return rf"\frac{{{percent[1]}}}{{100}}" if percent else text


class _Comparer:
    """The process, started when it is needed and ended by `stop`, by garbage collection, or with this process."""

    START_S = 60.0

    def __init__(self, memory_bytes: int) -> None:
        self._memory_bytes = memory_bytes
        self._child: subprocess.Popen[bytes] | None = None
        self._end: Callable[[], object] = lambda: None

    def compare(self, gold: str, answer: str, limit_s: float) -> Ruling:
        fault = self._start()
        if fault is not None:
            return Ruling(status=RulingStatus.UNAVAILABLE, detail=fault)
        child = self._child
        assert child is not None
        assert child.stdin is not None
        request = json.dumps({"gold": gold, "answer": answer, "limit_s": limit_s}) + "\n"
        try:
            child.stdin.write(request.encode())
            child.stdin.flush()
        except OSError:
            self.stop()
            return Ruling(status=RulingStatus.UNAVAILABLE, detail="the process ended before it was asked")
        reply = _read_line(child, limit_s + _GRACE_S)
        if reply is None:
            return self._ended(limit_s)
        if "right" in reply:
            return Ruling(status=RulingStatus.RIGHT if reply["right"] else RulingStatus.WRONG)
        status = RulingStatus.BAD_REFERENCE if reply["fault"] == "reference" else RulingStatus.CRASHED
        return Ruling(status=status, detail=reply["detail"])

    def stop(self) -> None:
        self._end()
        self._child = None

    def _ended(self, limit_s: float) -> Ruling:
        """Why there is no reply: it is killed by its alarm, still running, or gone."""
        assert self._child is not None
        code = self._child.poll()
        self.stop()
        if code is None or code == -signal.SIGALRM:
            return Ruling(status=RulingStatus.TIMEOUT, detail=f"comparing it takes more than {limit_s:g} s")
        return Ruling(status=RulingStatus.CRASHED, detail=f"comparing it ended the process with code {code}")

    def _start(self) -> str | None:
        """Why it cannot be asked, or None."""
        if self._child is not None and self._child.poll() is None:
            return None
        self.stop()
        try:
            self._child = subprocess.Popen(
                [sys.executable, "-I", str(_WORKER), str(self._memory_bytes)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={},
                cwd="/",
                start_new_session=True,
            )
        except OSError as error:
            return f"its process cannot be started ({error.strerror})"
        self._end = weakref.finalize(self, _end, self._child)
        if _read_line(self._child, self.START_S) is None:
            self.stop()
            return f"its process is not ready after {self.START_S:g} s, or ended"
        return None


def _read_line(child: subprocess.Popen[bytes], limit_s: float) -> dict[str, Any] | None:
    """One line of JSON; None when none comes in time or the process has ended. Waits for its end then."""
    assert child.stdout is not None
    deadline, line = time.monotonic() + limit_s, b""
    while not line.endswith(b"\n"):
        ready, _, _ = select.select([child.stdout], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return None
        read = child.stdout.read1()  # type: ignore[attr-defined]
        if not read:
            child.wait()
            return None
        line += read
    reply: dict[str, Any] = json.loads(line)
    return reply


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait()
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):  # what was not yet written to a process that is gone
                pipe.close()
