"""One engine of a group as the driver sees it: an actor that is called under watch, and started again when it dies."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from lightning_mappa.errors import InfrastructureError
from lightning_mappa.rollout.step_loop import EngineBroken


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """How long to wait for what, in seconds."""

    deadline_s: float
    """For any answer: no wait is longer."""
    heartbeat_s: float
    """An engine that owes an answer and does not answer a ping for so long counts as dead."""
    start_s: float
    """For an engine to load its model."""


class ReplicaDied(Exception):
    """The actor is gone, silent, or broken; what was asked of it has no answer."""


class Replica:
    """Lives on one event loop.

    Args:
        start: makes the actor, without waiting for it.
        restore: gives a fresh actor the weights and versions that the group serves.
        allow_restart: called with the reason before each restart; raises when no more are allowed.
    """

    def __init__(
        self,
        name: str,
        watch: Watch,
        *,
        start: Callable[[], Any],
        restore: Callable[[Replica], Awaitable[None]],
        allow_restart: Callable[[str], None],
    ) -> None:
        self.name = name
        self._watch = watch
        self._start = start
        self._restore = restore
        self._allow_restart = allow_restart
        self.actor: Any = None
        """Ray's handle; None while there is none."""
        self.pid = 0
        """Of the actor's process, on its node."""
        self._incarnation = 0
        self._replacing: asyncio.Task[None] | None = None
        self._ping: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Raises `InfrastructureError` when the engine cannot be started, which is not tried twice."""
        try:
            await self._launch()
        except ReplicaDied as error:
            raise InfrastructureError(f"{self.name} cannot be started: {error}") from error

    async def ask(self, method: str, *args: Any, abort: str | None = None) -> Any:
        """The answer of `method(*args)`, from whichever incarnation of the actor gives one first.

        An actor that dies meanwhile is started again and asked again; an answer that a dead one may still have
        given is not looked at. Cancelled or too late, it takes the request `abort` back.
        """
        while True:
            if self._replacing is not None:
                await asyncio.shield(self._replacing)
            incarnation = self._incarnation
            try:
                return await self.ask_once(method, *args, abort=abort)
            except ReplicaDied as error:
                if self._replacing is None and self._incarnation == incarnation:
                    # A task of its own: whoever noticed first may be cancelled while a fresh actor still lacks
                    # its weights.
                    self._replacing = _task(self._replace(str(error)))

    async def ask_once(self, method: str, *args: Any, abort: str | None = None) -> Any:
        """Raises `ReplicaDied` when this incarnation gives no answer."""
        actor = self.actor
        if actor is None:
            raise ReplicaDied("it is not running")
        try:
            return await self._watched(actor, getattr(actor, method).remote(*args), method)
        except (asyncio.CancelledError, InfrastructureError):
            if abort is not None:
                with contextlib.suppress(RayError):
                    actor.abort.remote(abort)
            raise

    async def stop(self) -> None:
        """Ends the actor's process. Idempotent."""
        actor, self.actor = self.actor, None
        if actor is not None:
            ray.kill(actor, no_restart=True)  # also a process that is stopped, and hears nothing

    async def _replace(self, reason: str) -> None:
        try:
            while True:
                self._allow_restart(f"{self.name}: {reason}")
                await self.stop()
                try:
                    await self._launch()
                    await self._restore(self)
                    break
                except ReplicaDied as error:
                    reason = str(error)
            self._incarnation += 1
        except BaseException:
            await self.stop()  # it may be up without its weights
            raise
        finally:
            self._replacing = None

    async def _launch(self) -> None:
        self._ping = None
        self.actor = self._start()
        self.pid = await self._answer(self.actor.ping.remote(), "its start", self._watch.start_s)

    async def _watched(self, actor: Any, ref: ray.ObjectRef[Any], what: str) -> Any:
        answer = asyncio.ensure_future(self._answer(ref, what, self._watch.deadline_s))
        try:
            while True:
                done, _ = await asyncio.wait({answer}, timeout=self._watch.heartbeat_s)
                if done:
                    return answer.result()
                # All who wait for this actor share one ping.
                if self._ping is None or self._ping.done():
                    self._ping = _task(self._ping_once(actor))
                await asyncio.shield(self._ping)
        finally:
            answer.cancel()

    async def _ping_once(self, actor: Any) -> None:
        try:
            await self._answer(actor.ping.remote(), "a ping", self._watch.heartbeat_s)
        except InfrastructureError as error:
            raise ReplicaDied(f"no sign of life for {self._watch.heartbeat_s:g} s") from error

    @staticmethod
    async def _answer(ref: ray.ObjectRef[Any], what: str, timeout_s: float) -> Any:
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.wrap_future(ref.future())
        except TimeoutError as error:
            raise InfrastructureError(f"no answer to {what} after {timeout_s:g} s") from error
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, InfrastructureError) and not isinstance(cause, EngineBroken):
                raise InfrastructureError(str(cause)) from error
            raise ReplicaDied(f"{type(cause).__name__}: {cause}") from error
        except RayError as error:
            raise ReplicaDied(_why(error)) from error


def _why(error: RayError) -> str:
    """An error in an actor's constructor ends a long message; anything else is a process that is gone."""
    last = str(error).strip().splitlines()[-1].strip()
    named = isinstance(error, RayActorError) and "creation task" in str(error)
    return last if named or not isinstance(error, RayActorError) else "its process ended"


def _task(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """A task whose error is told to those who wait for it, and to nobody when none does any more."""
    task = asyncio.create_task(work)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return task
