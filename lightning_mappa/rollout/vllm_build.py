"""An in-process vLLM engine as an `EngineGroup` describes it. Imports vLLM in its functions only."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from lightning_mappa.errors import InfrastructureError
from lightning_mappa.rollout.engine_group import AdapterSpec, EngineGroup
from lightning_mappa.rollout.step_loop import EngineBroken

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.llm_engine import LLMEngine

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Those that vLLM can be built for."""


def build_engine(group: EngineGroup) -> LLMEngine:
    """Takes 3 to 50 seconds, in the calling thread."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    return LLMEngine.from_engine_args(EngineArgs(**engine_arguments(group)))


def engine_arguments(group: EngineGroup) -> dict[str, Any]:
    """What vLLM's `EngineArgs` is made with."""
    from vllm.config import WeightTransferConfig

    on_cuda = torch.cuda.is_available()
    arguments: dict[str, Any] = {
        "model": group.model_path,
        "dtype": group.dtype,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "max_model_len": group.context_length,
        "max_num_seqs": group.max_batch_size,
        "tensor_parallel_size": group.tensor_parallel_size,
        "enforce_eager": not on_cuda if group.enforce_eager is None else group.enforce_eager,
        "enable_prefix_caching": group.enable_prefix_caching,
        # Of the distribution sampled from; raw ones are those of temperature 1 whatever was asked.
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
        "seed": 0,
        "weight_transfer_config": WeightTransferConfig(backend=group.weight_transport),
        "worker_extension_cls": "lightning_mappa.rollout.object_store_transfer.WorkerExtension",
    }
    if on_cuda:
        arguments |= {"gpu_memory_utilization": group.gpu_memory_utilization, "enable_sleep_mode": group.sleeps}
    else:
        arguments |= {
            "kv_cache_memory_bytes": int((group.kv_cache_gb or 1.0) * 2**30),
            # After part of a prompt vLLM turns the request's random generator back by what it has drawn, which
            # torch's CPU generator cannot do: the step raises. So prompts are computed whole.
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(2048, group.context_length, group.max_batch_size),
        }
    if group.adapters:
        rank = max(spec.r for spec in group.adapters.values())
        if rank > LORA_RANKS[-1]:
            raise InfrastructureError(f"model.lora.r is {rank}, vLLM serves at most {LORA_RANKS[-1]}")
        slots = len(group.adapters) + 1
        arguments |= {
            "enable_lora": True,
            "max_lora_rank": next(r for r in LORA_RANKS if r >= rank),
            "max_loras": slots,
            "max_cpu_loras": slots,
        }
    return arguments


def add_adapter(
    engine: LLMEngine, name: str, number: int, spec: AdapterSpec, tensors: Mapping[str, Tensor]
) -> LoRARequest:
    """Loads an adapter in the place of the one with this number; the requests of it name what is returned.

    vLLM takes adapters as files only, so for a moment there is one, in shared memory.
    """
    from vllm.lora.request import LoRARequest

    shared_memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(
        prefix="mappa-adapter-", dir=shared_memory if os.access(shared_memory, os.W_OK) else None
    ) as folder:
        targets = spec.target_modules if isinstance(spec.target_modules, str) else list(spec.target_modules)
        config = {"peft_type": "LORA", "r": spec.r, "lora_alpha": spec.alpha, "target_modules": targets}
        Path(folder, "adapter_config.json").write_text(json.dumps(config))
        save_file(dict(tensors), Path(folder, "adapter_model.safetensors"))
        engine.add_lora(LoRARequest(lora_name=name, lora_int_id=number, lora_path=folder, load_inplace=True))
    if number not in engine.list_loras():
        raise EngineBroken(f"vLLM did not load the adapter of {name!r}")
    return LoRARequest(lora_name=name, lora_int_id=number, lora_path="loaded")
