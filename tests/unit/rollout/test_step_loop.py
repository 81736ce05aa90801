"""The thread that steps an engine, on an engine that counts instead of decoding."""

from __future__ import annotations

import threading
import time
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Any

import pytest

from lightning_mappa.rollout.step_loop import EngineBroken, StepLoop

WAIT_S = 10.0


@dataclass
class Output:
    request_id: str
    finished: bool
    tokens: int


class CountingEngine:
    """Every step adds a token to each request; a request is finished at as many as it asked for."""

    def __init__(self) -> None:
        self.wanted: dict[str, int] = {}
        self.have: dict[str, int] = {}
        self.threads: set[int] = {threading.get_ident()}
        self.steps = 0
        self.gate = threading.Event()
        self.gate.set()
        self.breaks = False

    def add(self, request_id: str, tokens: int) -> None:
        self.threads.add(threading.get_ident())
        if tokens < 1:
            raise ValueError("no tokens")
        self.wanted[request_id], self.have[request_id] = tokens, 0

    def abort_request(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            del self.wanted[request_id]

    def step(self) -> list[Output]:
        self.gate.wait(WAIT_S)
        self.threads.add(threading.get_ident())
        self.steps += 1
        if self.breaks:
            raise MemoryError("planted")
        outputs = []
        for request_id, wanted in list(self.wanted.items()):
            self.have[request_id] += 1
            finished = self.have[request_id] == wanted
            if finished:
                del self.wanted[request_id]
            outputs.append(Output(request_id, finished, self.have[request_id]))
        return outputs


@pytest.fixture
def engine() -> CountingEngine:
    return CountingEngine()


@pytest.fixture
def loop(engine: CountingEngine) -> StepLoop:
    def build() -> Any:
        engine.threads = {threading.get_ident()}
        return engine

    return StepLoop(build)


def ask(loop: StepLoop, request_id: str, tokens: int) -> Future[Any]:
    return loop.generate(request_id, lambda engine: engine.add(request_id, tokens))


def test_requests_are_answered_each_when_it_is_done(loop: StepLoop, engine: CountingEngine) -> None:
    engine.gate.clear()
    long, short = ask(loop, "long", 9), ask(loop, "short", 2)
    engine.gate.set()
    assert short.result(WAIT_S).tokens == 2
    assert long.result(WAIT_S).tokens == 9
    assert engine.steps <= 10, "both shared their steps"


def test_one_thread_builds_steps_and_works_and_it_is_not_the_callers(loop: StepLoop, engine: CountingEngine) -> None:
    ask(loop, "a", 3).result(WAIT_S)
    worker = loop.call(lambda engine: threading.get_ident()).result(WAIT_S)
    assert engine.threads == {worker}
    assert worker != threading.get_ident()


def test_an_idle_engine_is_not_stepped(loop: StepLoop, engine: CountingEngine) -> None:
    ask(loop, "a", 3).result(WAIT_S)
    steps = engine.steps
    time.sleep(0.05)
    assert engine.steps == steps == 3


def test_work_is_done_between_steps_while_requests_are_in_flight(loop: StepLoop, engine: CountingEngine) -> None:
    engine.gate.clear()
    request = ask(loop, "a", 50)
    work = loop.call(lambda engine: engine.have["a"])
    engine.gate.set()
    assert work.result(WAIT_S) <= 1
    assert request.result(WAIT_S).tokens == 50


def test_a_request_that_is_refused_fails_alone(loop: StepLoop) -> None:
    with pytest.raises(ValueError, match="no tokens"):
        ask(loop, "a", 0).result(WAIT_S)
    assert ask(loop, "b", 2).result(WAIT_S).tokens == 2


def test_work_that_fails_leaves_the_engine_running(loop: StepLoop) -> None:
    with pytest.raises(ZeroDivisionError):
        loop.call(lambda engine: 1 / 0).result(WAIT_S)
    assert ask(loop, "b", 2).result(WAIT_S).tokens == 2


def test_a_request_that_is_taken_back_is_cancelled_and_the_others_go_on(loop: StepLoop, engine: CountingEngine) -> None:
    engine.gate.clear()
    gone, stays = ask(loop, "gone", 10**9), ask(loop, "stays", 4)
    loop.abort("gone")
    loop.abort("unknown")
    engine.gate.set()
    with pytest.raises(CancelledError):
        gone.result(WAIT_S)
    assert stays.result(WAIT_S).tokens == 4
    assert "gone" not in engine.wanted


def test_a_step_that_raises_breaks_the_engine_for_all_that_is_asked_then_and_later(
    loop: StepLoop, engine: CountingEngine
) -> None:
    engine.gate.clear()
    inside = [ask(loop, "a", 5), ask(loop, "b", 5)]
    engine.breaks = True
    engine.gate.set()
    for future in inside:
        with pytest.raises(EngineBroken, match="MemoryError: planted"):
            future.result(WAIT_S)
    engine.breaks = False
    with pytest.raises(EngineBroken, match="MemoryError: planted"):
        ask(loop, "c", 1).result(WAIT_S)
    with pytest.raises(EngineBroken, match="MemoryError: planted"):
        loop.call(lambda engine: 1).result(WAIT_S)


def test_work_that_leaves_the_engine_half_changed_breaks_it(loop: StepLoop, engine: CountingEngine) -> None:
    def half(engine: object) -> None:
        raise EngineBroken("half of the weights are new")

    engine.gate.clear()
    request = ask(loop, "a", 10**9)
    work = loop.call(half)
    engine.gate.set()
    for future in (work, request, ask(loop, "b", 1)):
        with pytest.raises(EngineBroken, match="half of the weights"):
            future.result(WAIT_S)


def test_an_engine_that_cannot_be_built_says_why() -> None:
    def build() -> Any:
        raise OSError("no such model")

    with pytest.raises(OSError, match="no such model"):
        StepLoop(build)
