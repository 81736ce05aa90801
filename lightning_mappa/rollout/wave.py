"""Waves: the generation calls of all live episodes as one batch, formed the same way in every run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from lightning_mappa.rollout.engine import Generation, GenerationRequest, Session

Decode = Callable[[Sequence[GenerationRequest]], Sequence[Generation]]


class WaveScheduler:
    """Decodes when every open session waits for a generation, in a worker thread, ordered by episode id.

    What a wave holds depends on who is open and not on how long tools take: an episode that runs a tool
    holds the wave back until it asks again or closes. Whether a wave is due is looked at one turn of the
    event loop later, so that a coroutine which closes one episode and opens the next without waiting in
    between, and tasks that are started together, are in the same wave.

    All sessions belong to one event loop at a time.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._open: dict[str, _WaveSession] = {}
        self._wave: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def session(self, episode_id: str) -> AsyncIterator[Session]:
        """Raises `ValueError` when the episode is open already."""
        if episode_id in self._open:
            raise ValueError(f"episode {episode_id!r} has an open session already")
        self._open[episode_id] = session = _WaveSession(self)
        try:
            yield session
        finally:
            del self._open[episode_id]
            self.look()

    def look(self) -> None:
        """Starts a wave in the next turn of the event loop, if one is due then."""
        asyncio.get_running_loop().call_soon(self._start_if_due)

    def _start_if_due(self) -> None:
        calls = [call for _, session in sorted(self._open.items()) if (call := session.waiting)]
        if self._wave is None and calls and len(calls) == len(self._open):
            self._wave = asyncio.get_running_loop().create_task(self._run(calls))

    async def _run(self, calls: Sequence[_Call]) -> None:
        try:
            generations = await asyncio.to_thread(self._decode, [call.request for call in calls])
            for call, generation in zip(calls, generations, strict=True):
                if not call.answer.done():
                    call.answer.set_result(generation)
        except Exception as error:
            for call in _unanswered(calls):
                call.answer.set_exception(error)
        finally:
            # Only where this task itself is cancelled: nobody may wait for ever.
            for call in _unanswered(calls):
                call.answer.cancel()
            self._wave = None
            # Sessions that opened while this wave was decoding may be all that is left.
            self.look()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    request: GenerationRequest
    answer: asyncio.Future[Generation]


def _unanswered(calls: Sequence[_Call]) -> list[_Call]:
    """Those whose episode still waits: a cancelled one does not."""
    return [call for call in calls if not call.answer.done()]


class _WaveSession:
    def __init__(self, scheduler: WaveScheduler) -> None:
        self._scheduler = scheduler
        self._call: _Call | None = None

    @property
    def waiting(self) -> _Call | None:
        """The call that has no answer yet."""
        return None if self._call is None or self._call.answer.done() else self._call

    async def generate(self, request: GenerationRequest) -> Generation:
        """Raises `RuntimeError` when this session waits already: an episode's actions are in order."""
        if self.waiting is not None:
            raise RuntimeError(f"a second generation for {request.agent_id!r} while its episode waits for one")
        answer: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        self._call = _Call(request=request, answer=answer)
        self._scheduler.look()
        return await answer
