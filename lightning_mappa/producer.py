"""Plays rollouts ahead of their training, one after the other, with weights changing only in between."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from lightning_mappa.rollout.coordinator import RolloutCoordinator
from lightning_mappa.rollout.plan import Rollout, RolloutPlan

T = TypeVar("T")
JOIN_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Produced:
    rollout: Rollout
    coordinator_state: dict[str, Any]
    """As it was when this rollout's last verdict had come: what a run resumed after it needs."""


class Producer:
    """An event loop in a thread of its own. What is ordered is played in the order of the calls.

    A rollout begins when the episodes of the one before have ended; their verdicts may still be under way.
    """

    def __init__(self, coordinator: RolloutCoordinator) -> None:
        self._coordinator = coordinator
        self._loop = asyncio.new_event_loop()
        self._workers = ThreadPoolExecutor(thread_name_prefix="rollout-work")
        self._loop.set_default_executor(self._workers)
        # Both wake those who wait in the order in which they came.
        self._engine = asyncio.Lock()
        self._verdicts = asyncio.Lock()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollouts", daemon=True)
        self._thread.start()

    def order(self, plan: RolloutPlan, before: Callable[[], object]) -> Future[Produced]:
        """Plays `plan` once everything ordered earlier has been played, after calling `before` in a worker thread.

        The future is cancelled by `drop`.
        """
        return self._submit(self._produce(plan, before))

    def drop(self) -> None:
        """Cancels what is ordered and under way. From any thread; returns at once. Once closed there is nothing."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._cancel_all)

    def close(self) -> None:
        """Drops everything and ends the thread. Closing twice is fine.

        What runs in worker threads cannot be cut short and is not waited for: a wave, a weight sync, a grading.
        """
        if not self._thread.is_alive():
            return
        with contextlib.suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(self._wind_up(), self._loop).result(JOIN_S)
        self._workers.shutdown(wait=False, cancel_futures=True)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(JOIN_S)
        if not self._thread.is_alive():
            self._loop.close()

    async def _produce(self, plan: RolloutPlan, before: Callable[[], object]) -> Produced:
        async with self._engine:
            await asyncio.to_thread(before)
            playing = await self._coordinator.play(plan)
        try:
            async with self._verdicts:
                rollout = await self._coordinator.scored(playing)
                return Produced(rollout=rollout, coordinator_state=self._coordinator.state())
        except BaseException:
            await playing.cancel()
            raise

    def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _cancel_all(self) -> None:
        current = asyncio.current_task(self._loop)
        for task in asyncio.all_tasks(self._loop):
            if task is not current:
                task.cancel()

    async def _wind_up(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
