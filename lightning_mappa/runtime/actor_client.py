"""vLLM's control of a weight transfer, over the actors of one group of engines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray

from lightning_mappa.errors import InfrastructureError


class ActorClient:
    """What vLLM calls a `VLLMWeightSyncClient`.

    Args:
        actors: of `VLLMServer`, every engine of the group.
        ranks_per_engine: tensor_parallel_size.
        timeout_s: no call waits longer.

    Every call raises `InfrastructureError` when an engine is lost, refuses, or is silent for too long.
    """

    def __init__(self, actors: Sequence[Any], ranks_per_engine: int, timeout_s: float) -> None:
        self._actors = list(actors)
        self._ranks = ranks_per_engine
        self._timeout_s = timeout_s

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Each engine counts its ranks from 0, so those behind the first are shifted in the group of all."""
        payloads = [
            init_info | {"rank_offset": init_info["rank_offset"] + i * self._ranks}
            if "rank_offset" in init_info
            else init_info
            for i in range(len(self._actors))
        ]
        self._all("init_weight_transfer_engine", payloads)

    def start_weight_update(self) -> None:
        self._all("start_weight_update", [None] * len(self._actors))

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        self._all("update_weights", [update_info] * len(self._actors))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """The version is told to the engines apart, with `VLLMEngine.announce`, which also resets their caches."""
        self._all("finish_weight_update", [None] * len(self._actors))

    def _all(self, method: str, payloads: Sequence[Any]) -> None:
        calls = [actor.transfer.remote(method, payload) for actor, payload in zip(self._actors, payloads, strict=True)]
        try:
            ray.get(calls, timeout=self._timeout_s)
        except ray.exceptions.GetTimeoutError as error:
            raise InfrastructureError(f"an engine did not answer {method} within {self._timeout_s:g} s") from error
        except ray.exceptions.RayError as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[-1]
            raise InfrastructureError(f"an engine broke off in {method}: {reason}") from error
