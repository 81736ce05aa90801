"""`engine=transformers`: batched sampling in this process, every agent with its own weights."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel

from lightning_mappa.errors import DataError, InfrastructureError
from lightning_mappa.models.load import load_trained_tensors
from lightning_mappa.rollout.decoding import Prompt, decode, next_log_probs
from lightning_mappa.rollout.engine import Generation, GenerationRequest, Session
from lightning_mappa.rollout.fingerprint import ServedFingerprint
from lightning_mappa.rollout.wave import WaveScheduler
from lightning_mappa.types import StopReason


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What one agent is answered with.

    Agents whose `model` is the same object are decoded in one batch: adapters on one base, or agents that
    are never updated.
    """

    model: PreTrainedModel | PeftModel
    """The engine's own copy: it is put into eval mode and its weights are written by `update_weights`."""
    eos_token_ids: frozenset[int]
    """Every id that ends a turn."""
    context_length: int
    adapter: str | None = None
    """The LoRA adapter of a PeftModel; None serves the base weights."""


class TransformersEngine:
    """An `Engine` over models of this process. Calls from several threads take turns.

    Args:
        served: by agent id.
        max_batch_size: most sequences decoded at a time; a wave with more is decoded in parts, in order.
        policy_version: what the weights given contain: 0 at the start of a run.
    """

    def __init__(
        self, served: Mapping[str, ServedModel], *, max_batch_size: int = 128, policy_version: int = 0
    ) -> None:
        if max_batch_size < 1:
            raise ValueError(f"max_batch_size is {max_batch_size}, allowed is 1 or more")
        for agent_id, one in served.items():
            _check_served(agent_id, one)
            one.model.eval().requires_grad_(False)
        self._served = dict(served)
        self._versions = dict.fromkeys(served, policy_version)
        self._max_batch_size = max_batch_size
        self._lock = threading.Lock()
        self._waves = WaveScheduler(self.generate_batch)

    def session(self, episode_id: str) -> AbstractAsyncContextManager[Session]:
        return self._waves.session(episode_id)

    def policy_version(self, agent_id: str) -> int:
        return self._versions[agent_id]

    def close(self) -> None:
        self._served.clear()

    def context_length(self, agent_id: str) -> int:
        return self._served[agent_id].context_length

    def update_weights(self, agent_id: str, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Replaces an agent's served weights in place, once no batch is being decoded.

        Raises `InfrastructureError`, with the old weights and version still served, on a missing, unknown or
        misshapen tensor, and where another agent is answered with the same weights.
        """
        one = self._find(agent_id)
        for other_id, other in self._served.items():
            if other_id != agent_id and other.model is one.model and other.adapter == one.adapter:
                raise InfrastructureError(f"weights of {agent_id!r} also serve {other_id!r} and cannot be updated")
        if isinstance(one.model, PeftModel) and one.adapter is None:
            raise InfrastructureError(f"{agent_id!r} is served by a shared base model, which cannot be updated")
        with self._lock:
            try:
                load_trained_tensors(one.model, tensors, one.adapter)
            except DataError as error:
                raise InfrastructureError(f"weights of {agent_id!r} at version {version}: {error}") from error
            self._versions[agent_id] = version

    def fingerprints(
        self, agent_id: str, prompt_ids: Sequence[int], token_ids: Sequence[int]
    ) -> list[ServedFingerprint]:
        one = self._find(agent_id)
        with self._lock:
            log_probs = next_log_probs(one.model, prompt_ids, token_ids, one.adapter)
            return [ServedFingerprint(engine="the engine", version=self._versions[agent_id], log_probs=log_probs)]

    def generate_batch(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        """Answers in the order of `requests`.

        Raises `InfrastructureError` for an agent that is not served, a prompt that is empty or does not fit
        the context with `max_new_tokens`, and logits that are not finite.
        """
        by_model: dict[int, list[int]] = {}
        for index, request in enumerate(requests):
            self._check_request(request)
            by_model.setdefault(id(self._served[request.agent_id].model), []).append(index)
        answers: dict[int, Generation] = {}
        with self._lock:
            for indices in by_model.values():
                for start in range(0, len(indices), self._max_batch_size):
                    part = indices[start : start + self._max_batch_size]
                    answers.update(zip(part, self._decode([requests[i] for i in part]), strict=True))
        return [answers[index] for index in range(len(requests))]

    def _decode(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        served = [self._served[request.agent_id] for request in requests]
        samples = decode(
            served[0].model,
            [
                Prompt(
                    ids=request.prompt_ids,
                    sampling=request.sampling,
                    seed=request.seed,
                    stop_ids=one.eos_token_ids,
                    adapter=one.adapter,
                )
                for request, one in zip(requests, served, strict=True)
            ],
        )
        return [
            Generation(
                response_ids=sample.ids,
                log_probs=sample.log_probs,
                stop_reason=StopReason.STOP if sample.stopped else StopReason.LENGTH,
                policy_version=self._versions[request.agent_id],
            )
            for request, sample in zip(requests, samples, strict=True)
        ]

    def _find(self, agent_id: str) -> ServedModel:
        if agent_id not in self._served:
            raise InfrastructureError(f"agent {agent_id!r} is not served; served are {sorted(self._served)}")
        return self._served[agent_id]

    def _check_request(self, request: GenerationRequest) -> None:
        limit = self._find(request.agent_id).context_length
        length, new = len(request.prompt_ids), request.sampling.max_new_tokens
        if length < 1 or new < 1 or length + new > limit:
            raise InfrastructureError(
                f"{request.agent_id!r}: {length} prompt tokens and {new} new ones do not fit: "
                f"at least one of each and at most {limit} together"
            )


def _check_served(agent_id: str, one: ServedModel) -> None:
    adapters = one.model.peft_config if isinstance(one.model, PeftModel) else {}
    if one.adapter is not None and one.adapter not in adapters:
        raise ValueError(f"{agent_id!r}: no adapter {one.adapter!r}, the model has {sorted(adapters)}")
