"""One thread at a time, always in the same order, and never a silent deadlock."""

from __future__ import annotations

import threading
import time

import pytest

from lightning_mappa.errors import InfrastructureError
from lightning_mappa.runtime.turn import Turn


def run_threads(bodies: dict) -> dict[str, BaseException]:
    errors: dict[str, BaseException] = {}

    def guarded(name, body):
        try:
            body()
        except BaseException as error:
            errors[name] = error

    threads = [threading.Thread(target=guarded, args=item, daemon=True) for item in bodies.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=10)
        assert not thread.is_alive()
    return errors


@pytest.mark.parametrize("first", ["a", "b", "c"])
def test_order_does_not_depend_on_which_thread_starts_first(first):
    names = ["a", "b", "c"]
    turn = Turn(names, deadline_s=5)
    events: list[str] = []
    counts = dict.fromkeys(names, 0)

    def body(name):
        if name != first:
            time.sleep(0.02)
        with turn.taken_by(name):
            for round_number in range(3):
                events.append(f"{name}{round_number}")
                counts[name] += 1
                turn.wait(name, lambda n=round_number: all(c > n for c in counts.values()), "the others")

    errors = run_threads({name: lambda name=name: body(name) for name in names})
    assert not errors
    # c, the last to fill a round, meets its own condition but a stands before it.
    assert events == ["a0", "b0", "c0", "a1", "b1", "c1", "a2", "b2", "c2"]


def test_nobody_runs_beside_the_holder():
    turn = Turn(["a", "b"], deadline_s=5)
    inside: list[str] = []

    def body(name):
        with turn.taken_by(name):
            for _ in range(20):
                inside.append(name)
                time.sleep(0.001)
                assert inside == [name]
                inside.remove(name)
                turn.wait(name, lambda: True, "nothing")

    assert not run_threads({"a": lambda: body("a"), "b": lambda: body("b")})


def test_a_deadlock_is_said_at_once_and_names_who_waits_for_what():
    turn = Turn(["a", "b"], deadline_s=60)

    def body(name, what):
        with turn.taken_by(name):
            turn.wait(name, lambda: False, what)

    start = time.monotonic()
    errors = run_threads({"a": lambda: body("a", "tea"), "b": lambda: body("b", "milk")})
    assert time.monotonic() - start < 5
    assert set(errors) == {"a", "b"}
    for error in errors.values():
        assert isinstance(error, InfrastructureError)
        assert "a for tea, b for milk" in str(error)


def test_no_wait_outlasts_the_deadline():
    turn = Turn(["a", "b"], deadline_s=0.2)

    def slow():
        with turn.taken_by("a"):
            time.sleep(1.0)

    def waits():
        with turn.taken_by("b"):
            pass

    errors = run_threads({"a": slow, "b": waits})
    assert "waited more than 0.2 s for start" in str(errors["b"])


def test_the_turn_goes_on_when_a_holder_raises():
    turn = Turn(["a", "b"], deadline_s=5)
    reached: list[str] = []

    def breaks():
        with turn.taken_by("a"):
            raise ValueError("boom")

    def goes_on():
        with turn.taken_by("b"):
            reached.append("b")

    errors = run_threads({"a": breaks, "b": goes_on})
    assert reached == ["b"]
    assert set(errors) == {"a"}
