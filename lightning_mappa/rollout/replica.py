"""One engine of a group as the driver sees it: an actor that is called under watch, and started again when it dies."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
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
        self._actor: Any = None
        self.pid = 0
        """Of the actor's process, on its node."""
        self._incarnation = 0
        self._changing = asyncio.Lock()
        self._ping: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Raises `InfrastructureError` when the engine cannot be started, which is not tried twice."""
        async with self._changing:
            try:
                await self._launch()
            except ReplicaDied as error:
                raise InfrastructureError(f"{self.name} cannot be started: {error}") from error

    async def ask(self, method: str, *args: Any, abort: str | None = None) -> Any:
        """The answer of `method(*args)`, from whichever incarnation of the actor gives one first.

        An actor that dies meanwhile is started again and asked again; an answer that a dead one may still have
        given is not looked at. Cancelled, it takes the request `abort` back.
        """
        while True:
            async with self._changing:
                incarnation = self._incarnation
            try:
                return await self.ask_once(method, *args, abort=abort)
            except ReplicaDied as error:
                await self._revive(incarnation, str(error))

    async def ask_once(self, method: str, *args: Any, abort: str | None = None) -> Any:
        """Raises `ReplicaDied` when this incarnation gives no answer."""
        actor = self._actor
        try:
            return await self._watched(getattr(actor, method).remote(*args), method)
        except asyncio.CancelledError:
            if abort is not None:
                with contextlib.suppress(RayError):
                    actor.abort.remote(abort)
            raise

    async def stop(self) -> None:
        """Ends the actor's process. Idempotent."""
        actor, self._actor = self._actor, None
        if actor is not None:
            ray.kill(actor, no_restart=True)  # also a process that is stopped, and hears nothing

    async def _revive(self, incarnation: int, reason: str) -> None:
        async with self._changing:
            while self._incarnation == incarnation:
                self._allow_restart(f"{self.name}: {reason}")
                await self.stop()
                try:
                    await self._launch()
                    await self._restore(self)
                except ReplicaDied as error:
                    reason = str(error)
                    continue
                self._incarnation += 1

    async def _launch(self) -> None:
        self._ping = None
        self._actor = self._start()
        self.pid = await self._answer(self._actor.ping.remote(), "its start", self._watch.start_s)

    async def _watched(self, ref: ray.ObjectRef[Any], what: str) -> Any:
        answer = asyncio.ensure_future(self._answer(ref, what, self._watch.deadline_s))
        try:
            while True:
                done, _ = await asyncio.wait({answer}, timeout=self._watch.heartbeat_s)
                if done:
                    return answer.result()
                await self._check_alive()
        finally:
            answer.cancel()

    async def _check_alive(self) -> None:
        """All who wait for this actor share one ping."""
        if self._ping is None or self._ping.done():
            self._ping = asyncio.create_task(self._ping_once(self._actor))
        await asyncio.shield(self._ping)

    async def _ping_once(self, actor: Any) -> None:
        if actor is None:
            raise ReplicaDied("it was stopped")
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
        except RayActorError as error:
            raise ReplicaDied("its process ended") from error
