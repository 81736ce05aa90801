"""What lives in one Ray actor of `engine=vllm`: an in-process vLLM engine that is fed while it decodes.

vLLM is imported in the constructor: it replaces `torch.set_num_threads` and sets memory policies for the whole
process, so this class must not be made in a process that trains.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from lightning_mappa.errors import InfrastructureError
from lightning_mappa.memory import peak_rss_gib
from lightning_mappa.rollout.engine import Generation, GenerationRequest
from lightning_mappa.rollout.engine_group import EngineGroup, server_environment
from lightning_mappa.rollout.expected_tensors import Shapes, check_shapes, expected_shapes
from lightning_mappa.rollout.step_loop import EngineBroken, StepLoop
from lightning_mappa.rollout.vllm_build import add_adapter, build_engine
from lightning_mappa.runtime.weight_transport import Bucket, StoredWeights, unpack
from lightning_mappa.types import StopReason

if TYPE_CHECKING:
    from vllm import RequestOutput
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.llm_engine import LLMEngine

ZERO_ID = 1
"""vLLM's number of the adapter that changes nothing."""


class VLLMServer:
    """Serves every agent of one group. All methods are coroutines, for an asynchronous Ray actor.

    A request without an adapter in a batch that also holds adapters is answered by vLLM with another adapter's
    weights (0.32.0, CPU). So on an engine with adapters every request names one: agents that have none, or
    have not been given any weights yet, are served with an adapter of zeros.

    Args:
        replica: number of this engine in its group.
        policy_version: what the weights in `group.model_path` contain.
    """

    def __init__(self, group: EngineGroup, replica: int = 0, policy_version: int = 0) -> None:
        for key, value in server_environment(group).items():
            os.environ.setdefault(key, value)
        self._group = group
        self._replica = replica
        self._versions = dict.fromkeys(group.agents, policy_version)
        self._expected: dict[str, Shapes] = {}
        self._zero: LoRARequest | None = None
        self._adapters: dict[str, LoRARequest] = {}
        self._asleep: set[str] = set()
        self._loop = StepLoop(self._build)

    # -- what the driver asks ---------------------------------------------------------------------------

    async def ping(self) -> int:
        """Answered between two decoding steps: an engine that hangs in one is as good as dead. The process id."""
        return await self._call(lambda engine: os.getpid())

    async def generate(self, request_id: str, request: GenerationRequest) -> Generation:
        """Raises `InfrastructureError` for a request that does not fit, and for logits that are not finite."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._group.check(request)
        params = SamplingParams(
            max_tokens=request.sampling.max_new_tokens,
            temperature=request.sampling.temperature,
            seed=request.seed,
            logprobs=0,  # of the sampled token alone
            flat_logprobs=True,
            ignore_eos=True,  # what ends a turn is said here and not in the model's folder
            stop_token_ids=sorted(self._group.agents[request.agent_id].eos_token_ids),
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,
        )
        version: list[int] = []

        def add(engine: LLMEngine) -> None:
            # Read on the engine's own thread: an update cannot come in between. A request that lives through
            # an update reports the version that it began with, the oldest that any of its tokens is from.
            version.append(self._versions[request.agent_id])
            self._add(engine, request_id, request.agent_id, request.prompt_ids, params)

        output = await self._answer(request_id, add)
        (completion,) = output.outputs
        ids = tuple(completion.token_ids)
        log_probs = _sampled(completion.logprobs)
        if completion.finish_reason not in ("stop", "length") or len(log_probs) != len(ids):
            raise InfrastructureError(
                f"{request.agent_id!r}: vLLM ended a request with {completion.finish_reason!r}, "
                f"{len(ids)} tokens and {len(log_probs)} log-probs"
            )
        if not all(map(math.isfinite, log_probs)):
            raise InfrastructureError(f"{request.agent_id!r}: the model's logits are not finite")
        return Generation(
            response_ids=ids,
            log_probs=log_probs,
            stop_reason=StopReason.STOP if completion.finish_reason == "stop" else StopReason.LENGTH,
            policy_version=version[0],
        )

    async def abort(self, request_id: str) -> None:
        self._loop.abort(request_id)

    async def fingerprint(
        self, request_id: str, agent_id: str, prompt_ids: Sequence[int], token_ids: Sequence[int]
    ) -> tuple[int, tuple[float, ...]]:
        """Version, and log p of each of `token_ids` as the next token at temperature 1, as any request gets it."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._group.agent(agent_id)
        params = SamplingParams(
            max_tokens=1,
            temperature=1.0,
            seed=0,
            logprob_token_ids=list(dict.fromkeys(token_ids)),
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        version: list[int] = []

        def add(engine: LLMEngine) -> None:
            version.append(self._versions[agent_id])
            self._add(engine, request_id, agent_id, prompt_ids, params)

        output = await self._answer(request_id, add)
        assert output.outputs[0].logprobs is not None
        first = output.outputs[0].logprobs[0]
        return version[0], tuple(first[token].logprob for token in token_ids)

    async def update_weights(self, agent_id: str, version: int, weights: StoredWeights | None, timeout_s: float) -> int:
        """Replaces the agent's served weights, between two decoding steps; returns the version then served.

        With None only the version goes up: the tensors came another way. Requests in flight go on with the new
        weights, their prompts computed anew. Raises `InfrastructureError`, with the old weights and version still
        served, on a missing, unknown or misshapen tensor, and for an agent whose weights are not its own.
        """
        one = self._group.agent(agent_id)
        if not one.trained:
            raise InfrastructureError(f"{agent_id!r} is frozen: its weights cannot be updated")
        if weights is None:
            return await self._call(lambda engine: self._finish(engine, agent_id, version))
        buckets = await weights.fetch(timeout_s)
        if agent_id not in self._expected:
            self._expected[agent_id] = await asyncio.to_thread(expected_shapes, self._group.model_path, one.adapter)
        check_shapes(agent_id, version, self._expected[agent_id], _shapes(buckets))
        return await self._call(lambda engine: self._update(engine, agent_id, version, buckets))

    async def transfer(self, method: str, payload: Any = None) -> None:
        """One call of vLLM's weight-transfer protocol, for transports that bypass the object store."""
        args = () if payload is None else (payload,)
        await self._call(lambda engine: engine.collective_rpc(method, args=args))

    async def versions(self) -> dict[str, int]:
        return dict(self._versions)

    async def peak_rss_gib(self) -> float | None:
        """The most memory that this process has held so far."""
        return peak_rss_gib()

    async def sleep(self, level: int = 1) -> None:
        """Frees the weights' and the cache's memory until `wake`; does nothing where the group does not sleep."""
        if self._sleeps():
            await self._call(lambda engine: engine.sleep(level))
            self._asleep = {"weights", "kv_cache"}

    async def wake(self, tags: Sequence[str] | None = None) -> None:
        """`weights` before an update and `kv_cache` after it keeps both from being alive at a time; None wakes all.

        What is awake stays so: vLLM would map the same memory twice.
        """
        woken = sorted(self._asleep.intersection(self._asleep if tags is None else tags))
        if woken:
            await self._call(lambda engine: engine.wake_up(woken))
            self._asleep.difference_update(woken)

    # -- on the engine's thread -------------------------------------------------------------------------

    def _build(self) -> LLMEngine:
        engine = build_engine(self._group)
        if self._group.adapters:
            spec = next(iter(self._group.adapters.values()))
            shapes = expected_shapes(self._group.model_path, spec)
            zeros = {name: torch.zeros(shape) for name, shape in shapes.items()}
            self._zero = add_adapter(engine, "zero", ZERO_ID, spec, zeros)
        return engine

    def _add(self, engine: LLMEngine, request_id: str, agent_id: str, prompt_ids: Sequence[int], params: Any) -> None:
        # vLLM knows no ids without a tokenizer, and a step with one too many breaks off for everybody.
        vocab_size = engine.model_config.get_vocab_size()
        if not 0 <= min(prompt_ids) <= max(prompt_ids) < vocab_size:
            raise InfrastructureError(f"{agent_id!r}: a prompt id is not in 0 to {vocab_size - 1}")
        try:
            engine.add_request(
                request_id,
                {"prompt_token_ids": list(prompt_ids)},
                params,
                lora_request=self._adapters.get(agent_id, self._zero),
            )
        except ValueError as error:
            raise InfrastructureError(f"{agent_id!r}: vLLM refuses the request: {error}") from error

    def _update(self, engine: LLMEngine, agent_id: str, version: int, buckets: Sequence[Bucket]) -> int:
        spec = self._group.agents[agent_id].adapter
        try:
            if spec is None:
                engine.collective_rpc("start_weight_update")
                for bucket in buckets:
                    engine.collective_rpc("update_weights", args=({"tensors": bucket.tensors, "data": bucket.data},))
                engine.collective_rpc("finish_weight_update")
            else:
                number = ZERO_ID + 1 + list(self._group.adapters).index(agent_id)
                tensors = {name: tensor for bucket in buckets for name, tensor in unpack(bucket).items()}
                self._adapters[agent_id] = add_adapter(engine, agent_id, number, spec, tensors)
            return self._finish(engine, agent_id, version)
        except Exception as error:
            raise EngineBroken(
                f"weights of {agent_id!r} at version {version} broke off: {type(error).__name__}: {error}"
            ) from error

    def _finish(self, engine: LLMEngine, agent_id: str, version: int) -> int:
        self._reset_cache(engine)
        self._versions[agent_id] = version
        return version

    def _reset_cache(self, engine: LLMEngine) -> None:
        if not engine.reset_prefix_cache(reset_running_requests=True):
            raise EngineBroken("vLLM did not reset its prefix cache")

    # -- small things -----------------------------------------------------------------------------------

    def _sleeps(self) -> bool:
        return self._group.sleeps and torch.cuda.is_available()

    async def _call(self, work: Any) -> Any:
        return await asyncio.wrap_future(self._loop.call(work))

    async def _answer(self, request_id: str, add: Any) -> RequestOutput:
        return await asyncio.wrap_future(self._loop.generate(request_id, add))


def _shapes(buckets: Sequence[Bucket]) -> dict[str, tuple[int, ...]]:
    return {one.name: one.shape for bucket in buckets for one in bucket.tensors}


def _sampled(flat: Any) -> tuple[float, ...]:
    """The first entry of every position: requests beside this one may have asked for more than that."""
    return tuple(flat.logprobs[start] for start in flat.start_indices)
