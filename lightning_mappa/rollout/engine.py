"""What an engine is: token ids in, sampled token ids and their log-probs out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from lightning_mappa.rollout.fingerprint import ServedFingerprint
from lightning_mappa.types import StopReason


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    max_new_tokens: int
    temperature: float = 1.0
    """0 is greedy; log-probs are then those of temperature 1."""
    top_p: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    agent_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    """The sample depends on weights, prompt, sampling and this seed, not on what else is in the batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    response_ids: tuple[int, ...]
    """Ends with the end-of-turn token when `stop_reason` is stop."""
    log_probs: tuple[float, ...]
    """float32, of the distribution sampled from (temperature applied), one per response id."""
    stop_reason: StopReason
    policy_version: int


class Session(Protocol):
    """One episode's line to the engine; requests of one session keep to one engine and its cache."""

    async def generate(self, request: GenerationRequest) -> Generation: ...


class Engine(Protocol):
    """Serves the weights of every agent."""

    def session(self, episode_id: str) -> AbstractAsyncContextManager[Session]:
        """Opens an episode. A wave engine decodes when every open session waits for a generation."""
        ...

    def update_weights(self, agent_id: str, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Replaces the served weights of one agent in place, all of its trained tensors at once.

        Only between rollout batches. Raises `InfrastructureError` on a missing, unknown or misshapen tensor.
        """
        ...

    def fingerprints(
        self, agent_id: str, prompt_ids: Sequence[int], token_ids: Sequence[int]
    ) -> Sequence[ServedFingerprint]:
        """What each replica says of `token_ids` as the next token after `prompt_ids`, at temperature 1.

        Through the same path as any request, prefix cache included.
        """
        ...

    def policy_version(self, agent_id: str) -> int:
        """Completed rollout steps contained in the served weights."""
        ...

    def close(self) -> None:
        """Frees what the engine holds. Closing twice is fine."""
        ...

    def context_length(self, agent_id: str) -> int:
        """Most tokens that prompt and response may have together."""
        ...


@runtime_checkable
class DirectEngine(Protocol):
    """An engine in actors that take weights straight from the ranks that train them."""

    def actors(self, agent_id: str) -> list[Any]:
        """Of the engines that serve the agent."""
        ...

    def announce(self, agent_id: str, version: int, n_bytes: int) -> None:
        """Says that they have the weights of `version`."""
        ...

    def wake(self, agent_id: str, tags: Sequence[str] | None = None) -> None:
        """As `Sleeper.wake_all`, of the engines that serve the agent; those awake stay so."""
        ...


@runtime_checkable
class Sleeper(Protocol):
    """An engine that can lend its GPU memory to a Trainer between two rollouts."""

    def sleep_all(self) -> None: ...

    def wake_all(self, tags: Sequence[str]) -> None:
        """`weights` before they are updated, `kv_cache` after it: the two are then never both twice in memory."""
        ...
