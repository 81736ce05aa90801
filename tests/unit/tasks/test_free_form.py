"""The process that compares free forms, under attack: answers that stall, crash or outlive it."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from lightning_mappa.errors import ConfigError
from lightning_mappa.tasks import free_form
from lightning_mappa.tasks.free_form import FreeFormVerifier
from lightning_mappa.tasks.verifiers import Ruling, RulingStatus
from tests.packages import needs

RIGHT, WRONG = RulingStatus.RIGHT, RulingStatus.WRONG


@pytest.fixture(scope="module")
def verifier():
    found = FreeFormVerifier(limit_s=2.0)
    yield found
    found.close()


@needs("math_verify")
def test_an_answer_that_computes_for_ever_is_wrong_in_time():
    """Five seconds by math-verify's own limit, and no limit at all in a thread."""
    verifier = FreeFormVerifier(limit_s=0.4)
    try:
        assert verifier.grade("2", "3").status is WRONG  # the process is up
        start = time.monotonic()
        grade = verifier.grade("9^{9^{9^9}}", "9")
        assert time.monotonic() - start < 2.0
        assert grade.status is RulingStatus.TIMEOUT
        assert grade.value == 0.0
        assert "more than 0.4 s" in grade.detail
        start = time.monotonic()
        assert verifier.grade("9^{9^{9^9}}", "9") == grade
        assert time.monotonic() - start < 0.05, "the same answer costs its time only once"
        assert verifier.grade(r"\frac{6}{2}", "3").status is RIGHT  # a new process
    finally:
        verifier.close()


@needs("math_verify")
def test_it_works_in_a_thread(verifier):
    found: list[Ruling] = []
    thread = threading.Thread(target=lambda: found.append(verifier.grade("0.25", r"\frac14")))
    thread.start()
    thread.join()
    assert found[0].status is RIGHT


@needs("math_verify")
def test_an_answer_without_end_is_not_looked_at(verifier):
    start = time.monotonic()
    assert verifier.grade("1+" * 5000 + "1", "3").status is RulingStatus.TOO_LONG
    assert time.monotonic() - start < 0.1


@needs("math_verify")
def test_an_answer_that_eats_memory_is_wrong_and_the_next_is_compared():
    verifier = FreeFormVerifier(limit_s=5.0, memory_mb=600)
    try:
        grade = verifier.grade("3^{10^{10}}+1", "3^{10^{10}}+2")
        assert grade.status in (RulingStatus.CRASHED, RulingStatus.TIMEOUT, WRONG)
        assert grade.value == 0.0
        assert verifier.grade("0.5", r"\frac12").status is RIGHT
    finally:
        verifier.close()


@needs("math_verify")
def test_a_reference_that_is_not_mathematics_says_nothing_of_the_answer(verifier):
    grade = verifier.grade("7", "")
    assert grade.status is RulingStatus.BAD_REFERENCE
    assert grade.value is None


@needs("math_verify")
def test_a_process_that_is_killed_is_an_answer_s_fault_once_and_starts_again():
    verifier = FreeFormVerifier()
    try:
        assert verifier.grade("0.5", r"\frac12").status is RIGHT
        child = verifier._process._child
        assert child is not None
        child.kill()
        child.wait()
        assert verifier.grade("0.25", r"\frac14").status is RIGHT
    finally:
        verifier.close()
    assert child.poll() is not None


@needs("math_verify")
def test_a_process_that_does_not_start_is_no_fault_of_the_answer(monkeypatch):
    monkeypatch.setattr(free_form.sys, "executable", "/nowhere/python")
    grade = FreeFormVerifier().grade("0.5", r"\frac12")
    assert grade.status is RulingStatus.UNAVAILABLE
    assert grade.value is None
    assert "cannot be started" in grade.detail


@needs("math_verify")
def test_the_process_ends_with_the_one_that_uses_it(tmp_path):
    """Killed while its child is busy: the child's own alarm ends it."""
    program = textwrap.dedent(
        """
        import os, sys, threading, time
        from lightning_mappa.tasks.free_form import FreeFormVerifier
        verifier = FreeFormVerifier(limit_s=1.0)
        verifier.grade("0.5", "1")
        print(verifier._process._child.pid, flush=True)
        threading.Thread(target=verifier.grade, args=("9^{9^{9^9}}", "9"), daemon=True).start()
        time.sleep(0.2)
        os.kill(os.getpid(), 9)
        """
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    pid = int(done.stdout)
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and _runs(pid):
        time.sleep(0.05)
    assert not _runs(pid)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def test_math_verify_is_an_extra(monkeypatch):
    monkeypatch.setattr(free_form, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"lightning-mappa\[math\]"):
        FreeFormVerifier()


@needs("math_verify")
@pytest.mark.parametrize("setting", [{"limit_s": 0}, {"max_chars": 0}, {"memory_mb": -1}])
def test_settings_out_of_range_are_refused(setting):
    with pytest.raises(ConfigError, match=r"must be more than 0"):
        FreeFormVerifier(**setting)
