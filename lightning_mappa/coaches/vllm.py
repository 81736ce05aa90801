"""A coach model in the run's own Ray cluster, served by vLLM engines of its own."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from lightning_mappa.coaches.provider import (
    CoachReply,
    CoachRequest,
    FatalError,
    PassingError,
    RefusedRequestError,
    Usage,
)
from lightning_mappa.errors import ConfigError, InfrastructureError
from lightning_mappa.thinking import strip_thinking
from lightning_mappa.types import StopReason

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lightning_mappa.rollout.engine_group import EngineGroup
    from lightning_mappa.rollout.vllm_engine import VLLMEngine
    from lightning_mappa.runtime.ray_cluster import RayCluster

AGENT = "coach"


class VLLMProvider:
    """A `Provider`. Needs the extra `vllm`.

    The engines start with the first call, in the cluster that the run is connected to, else in one of this process;
    on CUDA they take GPUs that the run's placement has left free. Replies are not held to a schema: they are read as
    text, where JSON counts only as it is told in `parse`. They are drawn by the seed of the request and nothing else.

    Args:
        model: `tiny`, a Hugging Face folder or id; a folder that every node sees.
        dtype: float32 or bfloat16.
        num_engines: replicas.
        tensor_parallel_size: GPUs of one engine.
        context_length: most tokens of prompt and reply together; None is what the model's config says.
        temperature: 0 gives the same reply to the same case; several samples need more.
        kv_cache_gb: on CPU, GiB per engine; None is 1.
        gpu_memory_utilization: on CUDA, share of a GPU's memory.
        accelerator: `cpu` asks for no GPU.
        start_s: seconds that an engine may take to load.
    """

    def __init__(
        self,
        model: str,
        dtype: str = "bfloat16",
        num_engines: int = 1,
        tensor_parallel_size: int = 1,
        context_length: int | None = None,
        temperature: float = 0.0,
        kv_cache_gb: float | None = None,
        gpu_memory_utilization: float = 0.85,
        accelerator: str = "cpu",
        start_s: float = 600.0,
    ) -> None:
        if temperature != 0 and not 0.01 <= temperature <= 2:
            raise ConfigError(f"coach.provider.temperature is {temperature}; allowed: 0, or 0.01 to 2")
        if dtype not in ("float32", "bfloat16"):
            raise ConfigError(f"coach.provider.dtype is {dtype!r}; allowed: float32, bfloat16")
        self.model = model
        self._dtype = dtype
        self._num_engines = num_engines
        self._tensor_parallel_size = tensor_parallel_size
        self._context_length = context_length
        self._temperature = temperature
        self._kv_cache_gb = kv_cache_gb
        self._gpu_memory_utilization = gpu_memory_utilization
        self._accelerator = accelerator
        self._start_s = start_s
        self._starting = asyncio.Lock()
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._limit = 0
        self._cluster: RayCluster | None = None
        self._engine: VLLMEngine | None = None
        self._closed = False

    async def check(self) -> None:
        """Raises `ConfigError` where vLLM is not installed, or there is no such model. Starts nothing."""
        for package in ("ray", "vllm"):
            if importlib.util.find_spec(package) is None:
                raise ConfigError(f"coach=vllm needs the package {package}: pip install 'lightning-mappa[vllm]'")
        self._load()

    async def ask(self, request: CoachRequest, timeout_s: float) -> CoachReply:
        engine = await self._running()
        prompt_ids = self._encoded(request)
        if len(prompt_ids) + request.max_tokens > self._limit:
            raise RefusedRequestError(
                f"{len(prompt_ids)} tokens and {request.max_tokens} of the reply do not fit into {self._limit}",
                too_long=True,
            )
        from lightning_mappa.rollout.engine import GenerationRequest, SamplingParams

        sampling = SamplingParams(max_new_tokens=request.max_tokens, temperature=self._temperature)
        ours = GenerationRequest(agent_id=AGENT, prompt_ids=prompt_ids, sampling=sampling, seed=request.seed)

        async def generated() -> Any:
            async with engine.session(request.call_id) as session:
                return await session.generate(ours)

        try:
            generation = await asyncio.wait_for(generated(), timeout_s)
        except TimeoutError:
            raise PassingError(f"no complete reply within {timeout_s:g} s") from None
        except InfrastructureError as error:
            raise FatalError(str(error)) from error
        assert self._tokenizer is not None
        text = self._tokenizer.decode(list(generation.response_ids), skip_special_tokens=True)
        return CoachReply(
            text=strip_thinking(str(text)),
            finish="end" if generation.stop_reason is StopReason.STOP else "length",
            usage=Usage(input_tokens=len(prompt_ids), output_tokens=len(generation.response_ids)),
            model=self.model,
            structured=False,
        )

    async def close(self) -> None:
        """Ends the engines; those that are still loading end once they are there."""
        self._closed = True
        engine, cluster = self._engine, self._cluster
        self._engine = self._cluster = None
        if engine is not None:
            await asyncio.to_thread(_end, engine)
        if cluster is not None:
            await asyncio.to_thread(cluster.close)

    async def _running(self) -> VLLMEngine:
        async with self._starting:
            if self._engine is not None:
                return self._engine
            self._closed = False
            try:
                # It waits for actors, in an event loop of its own.
                return await asyncio.to_thread(self._start)
            except InfrastructureError as error:
                raise FatalError(f"its engines do not start: {error}") from error

    def _start(self) -> VLLMEngine:
        """Cannot be cut short: it goes on when who waits for it is cancelled, or the provider is closed."""
        engine = self._engine = self._made()
        if self._closed:
            self._engine = None
            _end(engine)
        return engine

    def _made(self) -> VLLMEngine:
        import ray

        from lightning_mappa.rollout.engine_group import server_environment
        from lightning_mappa.rollout.vllm_engine import VLLMEngine
        from lightning_mappa.rollout.vllm_server import VLLMServer
        from lightning_mappa.runtime.ray_cluster import RayCluster

        group = self._group()
        if not ray.is_initialized():
            self._cluster = RayCluster(None, object_store_gb=None, accelerator=self._accelerator)

        def spawn(group: EngineGroup, replica: int, policy_version: int) -> Any:
            options = {
                "num_cpus": 0,  # beside the run's placement, which may have all of them
                "num_gpus": 0 if self._accelerator == "cpu" else group.tensor_parallel_size,
                "max_restarts": 0,
                "max_concurrency": 8192,
                "runtime_env": {"env_vars": server_environment(group)},
            }
            return ray.remote(VLLMServer).options(**options).remote(group, replica, policy_version)

        return VLLMEngine([group], spawn=spawn, start_s=self._start_s)

    def _group(self) -> EngineGroup:
        from lightning_mappa.models.load import load_config, resolve_path, turn_end_ids
        from lightning_mappa.rollout.engine_group import EngineGroup, ServedAgent

        tokenizer = self._load()
        served = ServedAgent(
            eos_token_ids=turn_end_ids(*load_config(self.model), tokenizer),
            context_length=self._limit,
            trained=False,
        )
        path = resolve_path(self.model)
        return EngineGroup(
            model_path=str(path.resolve() if isinstance(path, Path) else path),
            dtype=self._dtype,
            agents={AGENT: served},
            num_engines=self._num_engines,
            tensor_parallel_size=self._tensor_parallel_size,
            kv_cache_gb=self._kv_cache_gb,
            gpu_memory_utilization=self._gpu_memory_utilization,
        )

    def _load(self) -> PreTrainedTokenizerBase:
        from lightning_mappa.models.load import context_limit, load_config, load_tokenizer

        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self.model)
            self._limit = context_limit(load_config(self.model)[0], self._context_length)
        return self._tokenizer

    def _encoded(self, request: CoachRequest) -> tuple[int, ...]:
        """The prompt. Control tokens in the case are broken up, or what an agent wrote could open a turn of its own."""
        from lightning_mappa.workflows.conversation import ControlTokens

        tokenizer = self._load()
        asked = ControlTokens(tokenizer).plain(f"{request.shared}\n\n{request.question}")
        system, user = {"role": "system", "content": request.system}, {"role": "user", "content": asked}
        try:
            text = tokenizer.apply_chat_template([system, user], tokenize=False, add_generation_prompt=True)
        except TemplateError:  # some templates know no system prompt
            user = {"role": "user", "content": f"{request.system}\n\n{asked}"}
            text = tokenizer.apply_chat_template([user], tokenize=False, add_generation_prompt=True)
        return tuple(tokenizer.encode(str(text), add_special_tokens=False))


def _end(engine: VLLMEngine) -> None:
    import ray

    if ray.is_initialized():  # else its actors have gone with the cluster
        engine.close()
