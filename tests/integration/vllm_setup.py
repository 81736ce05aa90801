"""Small models in folders, engines on them, and what a trainer says of the same tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from lightning_mappa.models.load import load_model, trained_tensors
from lightning_mappa.policy import TokenLogProbs
from lightning_mappa.rollout.engine import Generation, GenerationRequest, SamplingParams
from lightning_mappa.rollout.engine_group import EngineGroup, ServedAgent
from lightning_mappa.rollout.fingerprint import TOLERANCE, Fingerprint, check_fingerprints, probe_ids
from lightning_mappa.rollout.vllm_engine import VLLMEngine
from lightning_mappa.rollout.vllm_server import VLLMServer

VOCAB = 160
CONTEXT = 512
EOS = 5


@contextmanager
def ray_cluster(num_cpus: int = 4) -> Iterator[None]:
    import ray

    ray.init(num_cpus=num_cpus, object_store_memory=100 * 2**20, include_dashboard=False, log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()


def save_model(folder: Path, *, tied: bool, seed: int = 0) -> str:
    """Two layers, random weights large enough that what comes next is far from uniform."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=CONTEXT,
        initializer_range=0.15,
        tie_word_embeddings=tied,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=7,  # not what the agents are told: theirs is `EOS`
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


def agent(**fields: Any) -> ServedAgent:
    return ServedAgent(**{"eos_token_ids": frozenset({EOS}), "context_length": CONTEXT, "trained": True, **fields})


def group(path: str, **fields: Any) -> EngineGroup:
    settings: dict[str, Any] = {"dtype": "float32", "agents": {"solver": agent()}, "kv_cache_gb": 0.06}
    return EngineGroup(model_path=path, **settings | fields)


def spawn_server(server: type[VLLMServer]) -> Any:
    """Places actors of a subclass of the server."""
    import ray

    from lightning_mappa.rollout.engine_group import server_environment

    def spawn(group: EngineGroup, replica: int, policy_version: int) -> Any:
        options = {"num_cpus": 1, "runtime_env": {"env_vars": server_environment(group)}}
        return ray.remote(server).options(**options).remote(group, replica, policy_version)

    return spawn


def request(
    seed: int, *, agent_id: str = "solver", length: int = 20, new: int = 24, **sampling: Any
) -> GenerationRequest:
    generator = torch.Generator().manual_seed(seed)
    return GenerationRequest(
        agent_id=agent_id,
        prompt_ids=tuple(torch.randint(8, VOCAB, (length,), generator=generator).tolist()),
        sampling=SamplingParams(max_new_tokens=new, **sampling),
        seed=2**53 - 1 - seed,
    )


def answers(engine: VLLMEngine, requests: Sequence[GenerationRequest], apart_s: float = 0.0) -> list[Generation]:
    """One episode per request; each is sent `apart_s` after the one before."""

    async def one(index: int, request: GenerationRequest) -> Generation:
        async with engine.session(str(index)) as session:
            await asyncio.sleep(index * apart_s)
            return await session.generate(request)

    async def play() -> list[Generation]:
        return await asyncio.gather(*(one(i, request) for i, request in enumerate(requests)))

    return asyncio.run(play())


def trainer_log_probs(
    model: PreTrainedModel | PeftModel, request: GenerationRequest, generation: Generation
) -> list[float]:
    """As the training step forms them, at the request's temperature."""
    return policy_log_probs(
        model, request.prompt_ids, generation.response_ids, request.sampling.temperature or 1.0
    ).tolist()


def policy_log_probs(
    model: PreTrainedModel | PeftModel, prompt_ids: Sequence[int], response_ids: Sequence[int], temperature: float
) -> Tensor:
    ids_BT = torch.tensor([[*prompt_ids, *response_ids]])
    select_BT = torch.zeros_like(ids_BT, dtype=torch.bool)
    select_BT[:, len(prompt_ids) :] = True
    with torch.no_grad():
        log_probs_BT = TokenLogProbs(model.eval())(
            ids_BT, torch.ones_like(select_BT), select_BT=select_BT, temperature=temperature, chunk_size=1024
        ).log_probs_BT
    return log_probs_BT[select_BT]


def largest_gap(
    model: PreTrainedModel | PeftModel, requests: Sequence[GenerationRequest], generations: Sequence[Generation]
) -> float:
    gaps = [
        abs(own - served)
        for request, generation in zip(requests, generations, strict=True)
        for own, served in zip(trainer_log_probs(model, request, generation), generation.log_probs, strict=True)
    ]
    return max(gaps)


def trained(path: str) -> PreTrainedModel:
    return load_model(path, dtype="float32")


def change(model: PreTrainedModel | PeftModel, seed: int) -> dict[str, torch.Tensor]:
    """Trains nothing, but moves every tensor a good deal."""
    generator = torch.Generator().manual_seed(seed)
    tensors = trained_tensors(model)
    with torch.no_grad():
        for tensor in tensors.values():
            tensor.add_(torch.randn(tensor.shape, generator=generator) * 0.1)
    return tensors


def fingerprint_gap(
    engine: VLLMEngine, model: PreTrainedModel | PeftModel, version: int, agent_id: str = "solver"
) -> float:
    """As the runtime checks it after a weight sync; raises where they differ."""
    prompt_ids, token_ids = probe_ids(VOCAB, CONTEXT)
    log_probs = tuple(float(policy_log_probs(model, prompt_ids, (token,), 1.0)) for token in token_ids)
    own = Fingerprint(prompt_ids=prompt_ids, token_ids=token_ids, log_probs=log_probs)
    served = engine.fingerprints(agent_id, prompt_ids, token_ids)
    return check_fingerprints(agent_id, version, own, served, TOLERANCE["float32"])
