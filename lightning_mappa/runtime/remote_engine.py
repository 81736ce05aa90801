"""`engine=transformers` in an actor: the same waves, decoded in another process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import ray
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from lightning_mappa.errors import EngineLost, InfrastructureError, MappaError
from lightning_mappa.memory import peak_rss_gib
from lightning_mappa.rollout.engine import Generation, GenerationRequest, Session
from lightning_mappa.rollout.fingerprint import ServedFingerprint
from lightning_mappa.rollout.wave import WaveScheduler
from lightning_mappa.runtime.weight_transport import StoredWeights, unpack

START_S = 600.0


class TransformersWorker:
    """Holds a `TransformersEngine`. Its methods run in threads, so that it answers while it decodes.

    Args:
        config: of the run, as YAML.
    """

    def __init__(self, config: str) -> None:
        from lightning_mappa.agents import load_agents
        from lightning_mappa.system import build_engine, quiet_libraries, seed_everything

        cfg = OmegaConf.create(config)
        assert isinstance(cfg, DictConfig)
        quiet_libraries()
        seed_everything(cfg)
        agents = load_agents(cfg)
        self._engine = build_engine(cfg, agents)
        self._context_lengths = {agent_id: agent.facts.context_length for agent_id, agent in agents.items()}

    def ready(self) -> dict[str, int]:
        """Context length by agent."""
        return self._context_lengths

    def generate_batch(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        return self._engine.generate_batch(requests)

    def update_weights(self, agent_id: str, version: int, weights: StoredWeights, timeout_s: float) -> None:
        tensors = {name: t for bucket in asyncio.run(weights.fetch(timeout_s)) for name, t in unpack(bucket).items()}
        self._engine.update_weights(agent_id, version, tensors)

    def fingerprints(
        self, agent_id: str, prompt_ids: Sequence[int], token_ids: Sequence[int]
    ) -> list[ServedFingerprint]:
        return self._engine.fingerprints(agent_id, prompt_ids, token_ids)

    def ping(self) -> float | None:
        """The most memory that the process has held so far, in GiB."""
        return peak_rss_gib()


class RemoteTransformersEngine:
    """An `Engine` whose weights and decoding are in an actor.

    An actor that dies, or does not answer a ping within `heartbeat_s`, is started again with the weights it had,
    and decodes the same wave anew: with the same seeds the answers are those it would have given.

    Args:
        spawn: makes the actor.
        deadline_s: longest wait for one wave or one update.
        max_restarts: over the whole run; more deaths raise `InfrastructureError`.
    """

    def __init__(self, spawn: Callable[[], Any], *, deadline_s: float, heartbeat_s: float, max_restarts: int) -> None:
        self._spawn = spawn
        self._deadline_s = deadline_s
        self._heartbeat_s = heartbeat_s
        self._restarts_left = max_restarts
        self._restarting = threading.Lock()
        self._weights: dict[str, tuple[int, StoredWeights]] = {}
        self._waves = WaveScheduler(self._generate_batch)
        self.sync_bytes: dict[str, int] = {}
        """Of the last weight sync, by agent."""
        self._context_lengths: dict[str, int] = {}
        self._start()

    def session(self, episode_id: str) -> AbstractAsyncContextManager[Session]:
        return self._waves.session(episode_id)

    def policy_version(self, agent_id: str) -> int:
        return self._weights[agent_id][0] if agent_id in self._weights else 0

    def context_length(self, agent_id: str) -> int:
        return self._context_lengths[agent_id]

    def update_weights(self, agent_id: str, version: int, tensors: Mapping[str, Tensor] | StoredWeights) -> None:
        weights = tensors if isinstance(tensors, StoredWeights) else StoredWeights.store(tensors)
        self._call("update_weights", agent_id, version, weights, self._deadline_s)
        self._weights[agent_id] = version, weights
        self.sync_bytes[agent_id] = weights.n_bytes

    def fingerprints(
        self, agent_id: str, prompt_ids: Sequence[int], token_ids: Sequence[int]
    ) -> list[ServedFingerprint]:
        return self._call("fingerprints", agent_id, prompt_ids, token_ids)

    def peak_rss_gib(self) -> dict[str, float | None]:
        """None where the engine does not answer; nobody starts it again for that."""
        try:
            return {"engine": ray.get(self._actor.ping.remote(), timeout=self._heartbeat_s)}
        except ray.exceptions.RayError:
            return {"engine": None}

    def close(self) -> None:
        ray.kill(self._actor)

    def _generate_batch(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        return self._call("generate_batch", requests)

    def _call(self, method: str, *arguments: Any) -> Any:
        while True:
            actor = self._actor
            try:
                return self._wait(getattr(actor, method).remote(*arguments))
            except ray.exceptions.RayTaskError as error:
                raise _cause(error) from error
            except ray.exceptions.RayActorError as error:
                self._restart(actor, error)

    def _start(self) -> None:
        """No sign of life is asked for before the weights are loaded."""
        self._actor = self._spawn()
        try:
            self._context_lengths = ray.get(self._actor.ready.remote(), timeout=START_S)
        except ray.exceptions.GetTimeoutError as error:
            raise InfrastructureError(f"the engine was not ready within {START_S:g} s") from error
        except ray.exceptions.RayTaskError as error:
            raise _cause(error) from error

    def _wait(self, ref: Any) -> Any:
        """Looks after the actor while it works. Raises `RayActorError` when it is gone or hangs."""
        waited = 0.0
        while not ray.wait([ref], timeout=self._heartbeat_s)[0]:
            waited += self._heartbeat_s
            if waited > self._deadline_s:
                raise InfrastructureError(f"the engine took more than {self._deadline_s:g} s")
            ping = self._actor.ping.remote()
            if not ray.wait([ping], timeout=self._heartbeat_s)[0]:
                ray.kill(self._actor)
        return ray.get(ref)

    def _restart(self, dead: Any, error: Exception) -> None:
        """Tries until an engine is up with its weights. Raises `EngineLost` when no restart is left."""
        with self._restarting:
            if self._actor is not dead:
                return  # another call has met with it and done this already
            while True:
                if self._restarts_left == 0:
                    raise EngineLost(f"the engine died once more than runtime.max_restarts allows: {error}")
                self._restarts_left -= 1
                try:
                    self._start()
                    for agent_id, (version, weights) in list(self._weights.items()):
                        self._wait(self._actor.update_weights.remote(agent_id, version, weights, self._deadline_s))
                    return
                except (ray.exceptions.RayError, InfrastructureError) as again:
                    ray.kill(self._actor)  # it may be up without its weights
                    error = again


def _cause(error: ray.exceptions.RayTaskError) -> Exception:
    cause = error.cause
    return cause if isinstance(cause, MappaError) else InfrastructureError(str(error).strip().splitlines()[-1])
