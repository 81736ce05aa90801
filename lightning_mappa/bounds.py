"""What single keys of a config may hold: names to choose from, and bounds of numbers."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_mappa.algorithm.choices import ALGORITHM_OPTIONS
from lightning_mappa.errors import ConfigError

CHOICES: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    **ALGORITHM_OPTIONS,
    "cases": (("auto", "mathchat", "dsbench"), ()),
    "engine.name": (("transformers", "vllm"), ()),
    "engine.weight_transport": (("object_store", "nccl", "ipc"), ()),
    "runtime.name": (("local", "ray"), ()),
    "strategy": (("single_device", "zero2", "zero3", "zero3_offload"), ("ddp", "fsdp", "zero1")),
    "trainer.accelerator": (("cpu", "cuda", "gpu"), ("auto", "mps", "tpu")),
    "trainer.precision": (("32-true", "bf16-mixed"), ()),
}
"""Option -> (allowed values, documented values that this version does not build)."""

DTYPES = ("float32", "bfloat16", "float64")

AT_LEAST: Mapping[str, float] = {
    "seed": 0,
    "n_cases": 28,  # two of every audit template
    "optimizer.lr": 0,
    "optimizer.weight_decay": 0,
    "algorithm.process_weight": 0,
    "algorithm.outcome_weight": 0,
    "algorithm.mini_batch_size": 1,
    "algorithm.micro_batch_size": 1,
    "algorithm.micro_batch_tokens": 1,
    "algorithm.logprob_chunk_size": 1,
    "algorithm.max_skipped_steps": 1,
    "datamodule.rollout_batch_size": 1,
    "datamodule.n_samples_per_prompt": 1,
    "datamodule.max_episodes_in_flight": 1,
    "datamodule.val_n_samples": 1,
    "datamodule.val_temperature": 0,
    "datamodule.val_limit": 1,
    "datamodule.report_limit": 1,
    "engine.max_batch_size": 1,
    "engine.num_engines": 1,
    "engine.tensor_parallel_size": 1,
    "runtime.num_threads": 1,
    "runtime.max_staleness": 0,
    "runtime.max_restarts": 0,
    "trainer.max_steps": 1,
    "trainer.val_check_interval": 1,
    "trainer.checkpoint_every": 1,
    "trainer.keep_checkpoints": 1,
    "plan.nodes": 1,
    "plan.gpus_per_node": 0,
    "plan.task_tokens": 1,
    "recoach.max_steps": 1,
    "recoach.update_steps": 0,
}

ABOVE: Mapping[str, float] = {
    "optimizer.grad_clip": 0,
    "algorithm.clip_ratio_low": 0,
    "algorithm.clip_ratio_high": 0,
    "algorithm.dual_clip": 1,
    "algorithm.rollout_correction": 0,
    "datamodule.temperature": 0,
    "engine.kv_cache_gb": 0,
    "runtime.deadline_s": 0,
    "runtime.heartbeat_s": 0,
    "runtime.object_store_gb": 0,
    "plan.gpu_memory_gb": 0,
    "plan.node_memory_gb": 0,
}


def check_bound(key: str, value: float | None, *, at_least: float | None = None, above: float | None = None) -> None:
    """None passes: a field that may be None is then switched off."""
    if value is None:
        return
    if at_least is not None and not at_least <= value < float("inf"):
        raise ConfigError(f"{key} is {value}; allowed: {at_least} or more")
    if above is not None and not above < value < float("inf"):
        raise ConfigError(f"{key} is {value}; allowed: more than {above}")
