"""`engine=vllm`: the driver's side, over one or more engines in Ray actors per group of agents."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor

from lightning_mappa.coaches.loop_thread import LoopThread
from lightning_mappa.errors import EngineLost, InfrastructureError
from lightning_mappa.rollout.engine import Generation, GenerationRequest, Session
from lightning_mappa.rollout.engine_group import EngineGroup
from lightning_mappa.rollout.fingerprint import ServedFingerprint
from lightning_mappa.rollout.replica import Replica, Watch
from lightning_mappa.rollout.spawn import Spawn, spawn_anywhere
from lightning_mappa.runtime.weight_transport import StoredWeights

T = TypeVar("T")


@dataclass(slots=True)
class _Seats:
    """The replicas of one group and how many sessions each has."""

    group: EngineGroup
    replicas: list[Replica]
    sessions: list[int] = field(default_factory=list)


class VLLMEngine:
    """An `Engine` whose replicas live in Ray actors.

    Requests go out at once and need not wait for one another. What an episode asks of a group goes to one
    replica, whose prefix cache then holds the episode's conversation. A replica that dies, or owes an answer
    and is silent for `heartbeat_s`, is replaced, gets the group's weights and versions, and is asked again with
    the same seeds, at most `max_restarts` times over the run; then everything here raises `InfrastructureError`.

    Methods other than `generate` wait for actors, and may be called from any thread that runs no event loop.

    Args:
        policy_version: what the weights at the groups' `model_path` contain.
        spawn: where actors are placed.
    """

    def __init__(
        self,
        groups: Sequence[EngineGroup],
        *,
        policy_version: int = 0,
        spawn: Spawn = spawn_anywhere,
        deadline_s: float = 3600.0,
        heartbeat_s: float = 30.0,
        start_s: float = 600.0,
        max_restarts: int = 2,
    ) -> None:
        self.sync_bytes: dict[str, int] = {}
        """Of the last weight sync, by agent."""
        self.sync_s: dict[str, float] = {}
        """Seconds of the last `update_weights`, until the last replica served it."""
        self.restarts: list[str] = []
        """Why each replaced replica was replaced."""
        self._versions = {agent_id: policy_version for group in groups for agent_id in group.agents}
        self._stored: dict[str, tuple[int, StoredWeights | None]] = {}
        if len(self._versions) < sum(len(group.agents) for group in groups):
            raise ValueError("an agent is in two groups of engines")
        self._max_restarts = max_restarts
        self._failure: str | None = None
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._thread = LoopThread("vllm-engines")
        self._watch = Watch(deadline_s=deadline_s, heartbeat_s=heartbeat_s, start_s=start_s)
        self._seats: dict[str, _Seats] = {}
        try:
            self._wait(self._start(groups, spawn, policy_version))
        except BaseException:
            self.close()
            raise

    # -- sessions and requests --------------------------------------------------------------------------

    def session(self, episode_id: str) -> AbstractAsyncContextManager[Session]:
        return self._session()

    @asynccontextmanager
    async def _session(self) -> AsyncIterator[Session]:
        self._refuse_failed()
        places: list[tuple[_Seats, int]] = []
        with self._lock:
            for seats in self._groups():
                index = min(range(len(seats.replicas)), key=seats.sessions.__getitem__)
                seats.sessions[index] += 1
                places.append((seats, index))
        try:
            yield _Session(self, {id(seats): seats.replicas[index] for seats, index in places})
        finally:
            with self._lock:
                for seats, index in places:
                    seats.sessions[index] -= 1

    async def _generate(self, replica: Replica, request: GenerationRequest) -> Generation:
        self._refuse_failed()
        request_id = f"{request.agent_id}-{next(self._numbers)}"
        return await replica.ask("generate", request_id, request, abort=request_id)

    # -- weights ----------------------------------------------------------------------------------------

    def update_weights(self, agent_id: str, version: int, tensors: Mapping[str, Tensor] | StoredWeights) -> None:
        """Replaces the served weights of one agent in all its replicas at once.

        Raises `InfrastructureError`, with the old weights and version still served everywhere, on a missing,
        unknown or misshapen tensor.
        """
        self._find(agent_id)
        start = time.monotonic()
        stored = tensors if isinstance(tensors, StoredWeights) else StoredWeights.store(tensors)
        self._wait(self._update(agent_id, version, stored))
        self.sync_bytes[agent_id] = stored.n_bytes
        self.sync_s[agent_id] = time.monotonic() - start

    def announce(self, agent_id: str, version: int, n_bytes: int) -> None:
        """Says that `version` has arrived another way (`nccl`, `ipc`), where nothing is kept for a fresh engine."""
        self._find(agent_id)
        self._wait(self._update(agent_id, version, None))
        self.sync_bytes[agent_id] = n_bytes

    def actors(self, agent_id: str) -> list[Any]:
        """Handles of the agent's engines, for a Trainer that sends its weights itself."""
        return [replica.actor for replica in self._find(agent_id).replicas]

    async def _update(self, agent_id: str, version: int, stored: StoredWeights | None) -> None:
        replicas = self._find(agent_id).replicas
        args = (agent_id, version, stored, self._watch.deadline_s)
        # A replica that has taken the new weights and dies while others still load them gets these again.
        before, self._stored = self._stored, self._stored | {agent_id: (version, stored)}
        answers = await asyncio.gather(
            *(replica.ask("update_weights", *args) for replica in replicas), return_exceptions=True
        )
        for answer in answers:
            if isinstance(answer, BaseException):
                self._stored = before
                raise answer
        self._versions[agent_id] = min(answer for answer in answers if isinstance(answer, int))

    async def _restore(self, seats: _Seats, replica: Replica) -> None:
        for agent_id, (version, stored) in self._stored.items():
            if agent_id in seats.group.agents:
                if stored is None:
                    raise InfrastructureError(
                        f"{replica.name} was started again, but version {version} of {agent_id!r} went straight from "
                        "GPU to GPU and is not kept: resume from the last checkpoint"
                    )
                await replica.ask_once("update_weights", agent_id, version, stored, self._watch.deadline_s)

    def fingerprints(
        self, agent_id: str, prompt_ids: Sequence[int], token_ids: Sequence[int]
    ) -> list[ServedFingerprint]:
        """What each replica says of `token_ids` after `prompt_ids`, at temperature 1, and of its own version."""
        self._find(agent_id)
        return self._wait(self._fingerprints(agent_id, tuple(prompt_ids), tuple(token_ids)))

    async def _fingerprints(
        self, agent_id: str, prompt_ids: tuple[int, ...], token_ids: tuple[int, ...]
    ) -> list[ServedFingerprint]:
        replicas = self._find(agent_id).replicas
        answers = await asyncio.gather(
            *(
                replica.ask("fingerprint", f"fingerprint-{next(self._numbers)}", agent_id, prompt_ids, token_ids)
                for replica in replicas
            )
        )
        return [
            ServedFingerprint(engine=replica.name, version=version, log_probs=log_probs)
            for replica, (version, log_probs) in zip(replicas, answers, strict=True)
        ]

    def policy_version(self, agent_id: str) -> int:
        self._find(agent_id)
        return self._versions[agent_id]

    def peak_rss_gib(self) -> dict[str, float | None]:
        """The most memory that each engine's process has held so far; None where it does not answer."""
        replicas = [replica for seats in self._groups() for replica in seats.replicas]
        peaks = [None] * len(replicas) if self._failure is not None else self._wait(self._peaks(replicas))
        return dict(zip([replica.name for replica in replicas], peaks, strict=True))

    @staticmethod
    async def _peaks(replicas: Sequence[Replica]) -> list[float | None]:
        answers = await asyncio.gather(*(one.ask_once("peak_rss_gib") for one in replicas), return_exceptions=True)
        return [answer if isinstance(answer, float) else None for answer in answers]

    def context_length(self, agent_id: str) -> int:
        return self._find(agent_id).group.agents[agent_id].context_length

    # -- memory of engines that share a GPU with a Trainer ---------------------------------------------

    def sleep(self, agent_id: str, level: int = 1) -> None:
        """Frees the memory of the agent's engines, where their group sleeps."""
        self._find(agent_id)
        self._wait(self._all(agent_id, "sleep", level))

    def wake(self, agent_id: str, tags: Sequence[str] | None = None) -> None:
        """`weights` before an update, `kv_cache` after it; None wakes all."""
        self._find(agent_id)
        self._wait(self._all(agent_id, "wake", tags))

    def sleep_all(self) -> None:
        """`sleep` of every group."""
        for seats in self._groups():
            self.sleep(next(iter(seats.group.agents)))

    def wake_all(self, tags: Sequence[str]) -> None:
        """`wake` of every group."""
        for seats in self._groups():
            self.wake(next(iter(seats.group.agents)), tags)

    async def _all(self, agent_id: str, method: str, *args: Any) -> None:
        await asyncio.gather(*(replica.ask(method, *args) for replica in self._find(agent_id).replicas))

    # -- life and death ---------------------------------------------------------------------------------

    async def _start(self, groups: Sequence[EngineGroup], spawn: Spawn, policy_version: int) -> None:
        for group in groups:
            seats = _Seats(group, [], [0] * group.num_engines)
            for index in range(group.num_engines):
                seats.replicas.append(self._replica(seats, index, spawn, policy_version))
            self._seats.update(dict.fromkeys(group.agents, seats))
        await asyncio.gather(*(replica.start() for seats in self._groups() for replica in seats.replicas))

    def _replica(self, seats: _Seats, index: int, spawn: Spawn, policy_version: int) -> Replica:
        return Replica(
            f"engine {index} of {seats.group.name}",
            self._watch,
            start=lambda: spawn(seats.group, index, policy_version),
            restore=lambda replica: self._restore(seats, replica),
            allow_restart=self._allow_restart,
        )

    def _allow_restart(self, reason: str) -> None:
        self._refuse_failed()
        if len(self.restarts) >= self._max_restarts:
            self._failure = f"{reason}; {len(self.restarts)} engines were started again before, no more are allowed"
            self._refuse_failed()
        self.restarts.append(reason)

    def _refuse_failed(self) -> None:
        if self._failure is not None:
            raise EngineLost(self._failure)

    def close(self) -> None:
        """Ends every actor and breaks off what waits for one. Idempotent."""
        self._failure = self._failure or "the engines are closed"
        self._thread.close(self._stop())

    async def _stop(self) -> None:
        await asyncio.gather(*(replica.stop() for seats in self._groups() for replica in seats.replicas))

    # -- small things -----------------------------------------------------------------------------------

    def _groups(self) -> list[_Seats]:
        return list({id(seats): seats for seats in self._seats.values()}.values())

    def _find(self, agent_id: str) -> _Seats:
        self._refuse_failed()
        if agent_id not in self._seats:
            raise InfrastructureError(f"agent {agent_id!r} is not served; served are {sorted(self._seats)}")
        return self._seats[agent_id]

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run(self._run(work))

    async def _run(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            return await self._thread.run(work)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling() == 0:
                self._refuse_failed()  # `close` broke it off, and not the caller
            raise


class _Session:
    """Knows the replica that this episode has in every group."""

    def __init__(self, engine: VLLMEngine, replicas: Mapping[int, Replica]) -> None:
        self._engine = engine
        self._replicas = replicas

    async def generate(self, request: GenerationRequest) -> Generation:
        """Waits without holding up the caller's event loop; cancelled, it takes the request back."""
        engine = self._engine
        replica = self._replicas[id(engine._find(request.agent_id))]
        return await engine._run(engine._generate(replica, request))
