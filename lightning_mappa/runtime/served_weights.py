"""Which weights the engine serves: pushed by Trainers, put in between two rollouts, proved by a fingerprint."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from lightning_mappa.rollout.engine import DirectEngine, Engine, Sleeper
from lightning_mappa.rollout.fingerprint import Fingerprint, check_fingerprints


@dataclass(frozen=True, slots=True, kw_only=True)
class PushedWeights:
    """One agent's trained tensors of one policy version."""

    version: int
    tensors: Any
    """What the engine's `update_weights` takes: a mapping of tensors, or a handle on tensors elsewhere."""
    fingerprint: Fingerprint

    def kept(self) -> PushedWeights:
        """The same, independent of the trainer's memory."""
        if not isinstance(self.tensors, Mapping):
            return self
        copies = {name: tensor.clone() for name, tensor in self.tensors.items()}
        return PushedWeights(version=self.version, tensors=copies, fingerprint=self.fingerprint)


class ServedWeights:
    """The way from Trainers to the engine.

    Args:
        tolerances: by trained agent, see `check_fingerprints`.
        staged: whether pushed weights wait for `serve`; else they go into the engine at once.
    """

    def __init__(self, engine: Engine, tolerances: Mapping[str, float], *, staged: bool = False) -> None:
        self._engine = engine
        self._tolerances = tolerances
        self._keeps = staged
        self._staged: dict[int, dict[str, PushedWeights]] = {}
        self._under_way: set[str] = set()
        self._began = 0.0
        self._resting = False
        self._sync_s = 0.0

    def push(self, agent_id: str, pushed: PushedWeights) -> None:
        """Takes weights of an agent's next version. Raises `InfrastructureError` when the engine gets others."""
        if self._keeps:
            self._staged.setdefault(pushed.version, {})[agent_id] = pushed.kept()
        else:
            self._put({agent_id: pushed})

    def serve(self, version: int) -> None:
        """Puts what was staged as `version` into the engine, every agent at once. Only between two rollouts."""
        self._put(self._staged.pop(version, {}))

    def make_room(self, agent_id: str) -> list[Any]:
        """Readies the agent's engines for weights that go straight to them; returns their actors."""
        assert isinstance(self._engine, DirectEngine)
        if not self._under_way:
            self._began = time.monotonic()
        self._under_way.add(agent_id)
        if self._resting:
            self._engine.wake(agent_id, ["weights"])
        return self._engine.actors(agent_id)

    def arrived(self, agent_id: str, version: int, n_bytes: int, fingerprint: Fingerprint) -> None:
        """The agent's engines have got weights of `version` straight from its ranks.

        Raises `InfrastructureError` when they serve others.
        """
        assert isinstance(self._engine, DirectEngine)
        self._engine.announce(agent_id, version, n_bytes)
        if self._resting:
            self._engine.wake(agent_id, ["kv_cache"])
        self._check(agent_id, PushedWeights(version=version, tensors=None, fingerprint=fingerprint))
        self._under_way.remove(agent_id)
        if not self._under_way:  # agents send side by side: their time counts once
            self._sync_s += time.monotonic() - self._began

    def rest(self) -> None:
        """Lets an engine that shares GPUs with Trainers free its memory until the next `serve`."""
        if isinstance(self._engine, Sleeper):
            self._engine.sleep_all()
            self._resting = True

    def take_sync_s(self) -> float:
        """Seconds of weight sync since the last call."""
        seconds, self._sync_s = self._sync_s, 0.0
        return seconds

    def _put(self, pushed: Mapping[str, PushedWeights]) -> None:
        start = time.monotonic()
        self._wake("weights")
        _for_all(pushed, lambda agent_id, one: self._engine.update_weights(agent_id, one.version, one.tensors))
        self._wake("kv_cache")
        self._resting = False
        _for_all(pushed, self._check)
        self._sync_s += time.monotonic() - start

    def _wake(self, tag: str) -> None:
        if self._resting and isinstance(self._engine, Sleeper):
            self._engine.wake_all([tag])

    def _check(self, agent_id: str, pushed: PushedWeights) -> None:
        own = pushed.fingerprint
        served = self._engine.fingerprints(agent_id, own.prompt_ids, own.token_ids)
        check_fingerprints(agent_id, pushed.version, own, served, self._tolerances[agent_id])


def _for_all(pushed: Mapping[str, PushedWeights], work: Callable[[str, PushedWeights], object]) -> None:
    """Side by side, as each waits for an engine; raises the first error once all have ended."""
    with ThreadPoolExecutor(max_workers=max(1, len(pushed))) as pool:
        list(pool.map(work, pushed, pushed.values()))
