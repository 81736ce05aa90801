"""The one thread that touches an in-process vLLM engine: it takes work between two decoding steps."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from lightning_mappa.errors import InfrastructureError

if TYPE_CHECKING:
    from vllm import RequestOutput
    from vllm.v1.engine.llm_engine import LLMEngine

T = TypeVar("T")


class EngineBroken(InfrastructureError):
    """The engine is in a state that no later request can be answered from; its process has to be replaced."""


class StepLoop:
    """Steps the engine while it has requests, and waits for work while it has none.

    Everything put in is done in order, between two steps. When a step raises, or work raises `EngineBroken`,
    everything in flight and everything that comes later fails with `EngineBroken`.

    Args:
        build: makes the engine, on the thread that will step it. The constructor waits for it.
    """

    def __init__(self, build: Callable[[], LLMEngine]) -> None:
        self._work: queue.SimpleQueue[Callable[[LLMEngine], None]] = queue.SimpleQueue()
        self._answers: dict[str, Future[RequestOutput]] = {}
        self._broken: EngineBroken | None = None
        built: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(build, built), name="vllm-steps", daemon=True)
        self._thread.start()
        built.result()

    def call(self, work: Callable[[LLMEngine], T]) -> Future[T]:
        """Runs `work(engine)` between two steps."""
        future: Future[T] = Future()

        def run(engine: LLMEngine) -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                self._refuse_broken()
                future.set_result(work(engine))
            except EngineBroken as error:
                future.set_exception(error)
                self._break(error)
            except BaseException as error:
                future.set_exception(error)

        self._work.put(run)
        return future

    def generate(self, request_id: str, add: Callable[[LLMEngine], Any]) -> Future[RequestOutput]:
        """Runs `add(engine)`, which must add a request of this id, and answers with its final output.

        Cancelling the future does not take the request back: `abort` does.
        """
        future: Future[RequestOutput] = Future()

        def run(engine: LLMEngine) -> None:
            try:
                self._refuse_broken()
                add(engine)
                self._answers[request_id] = future
            except BaseException as error:
                _fail(future, error)

        self._work.put(run)
        return future

    def abort(self, request_id: str) -> None:
        """Takes a request back, if it is still there."""

        def run(engine: LLMEngine) -> None:
            future = self._answers.pop(request_id, None)
            if future is not None:
                engine.abort_request([request_id])
                future.cancel()

        self._work.put(run)

    def _run(self, build: Callable[[], LLMEngine], built: Future[None]) -> None:
        try:
            engine = build()
        except BaseException as error:
            built.set_exception(error)
            return
        built.set_result(None)
        while True:
            self._take_work(engine)
            if self._answers:
                try:
                    outputs = engine.step()
                except BaseException as error:
                    self._break(EngineBroken(f"a decoding step raised {type(error).__name__}: {error}"))
                    continue
                for output in outputs:
                    future = self._answers.pop(output.request_id, None) if output.finished else None
                    if future is not None and future.set_running_or_notify_cancel():
                        future.set_result(output)

    def _take_work(self, engine: LLMEngine) -> None:
        """All that has been put in; waits for some when there is nothing to step for."""
        wait = not self._answers
        while True:
            try:
                work = self._work.get(block=wait)
            except queue.Empty:
                return
            work(engine)
            wait = False

    def _refuse_broken(self) -> None:
        if self._broken is not None:
            raise self._broken

    def _break(self, error: EngineBroken) -> None:
        self._broken = error
        answers, self._answers = self._answers, {}
        for future in answers.values():
            _fail(future, error)


def _fail(future: Future[Any], error: BaseException) -> None:
    if future.set_running_or_notify_cancel():
        future.set_exception(error)
