"""One agent under training, as a LightningModule."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule
from peft import PeftModel
from transformers import PreTrainedModel
from typing_extensions import override

from lightning_mappa.batch_credit import advantages, finite_stats
from lightning_mappa.datamodules.rollout import rollout_data
from lightning_mappa.errors import ConfigError, DataError, NumericError
from lightning_mappa.microbatch import ForwardSize, Policy, cut, fingerprint_of, forward_in_pieces
from lightning_mappa.models.load import add_adapter, context_length, load_model, trained_parameters
from lightning_mappa.policy import LogProbs, TokenLogProbs
from lightning_mappa.policy_loss import PolicyLoss
from lightning_mappa.rollout.fingerprint import Fingerprint, probe_ids
from lightning_mappa.runtime.base import AgentLink
from lightning_mappa.schedule import lr_factor
from lightning_mappa.seeds import derive_seed
from lightning_mappa.step_metrics import Update, batch_metrics, update_metrics
from lightning_mappa.strategies.zero import WholeTensors, ZeroStrategy, optimizer_step, ranks_of, release
from lightning_mappa.types import ExperienceBatch
from lightning_mappa.update import PolicyUpdate

_SKIPPED_IN_ROW = "skipped_in_row"


class AgentModule(LightningModule):
    """One agent's weights, log-probs, loss and optimizer. A train batch is one rollout step.

    Optimization is manual, because a rollout step is several optimizer steps. Log-probs are float32 (float64
    for a float64 model) whatever the precision. Everything runs in eval mode, so that the ratio of the first
    mini-batch is 1; only LoRA's own dropout, where asked for, acts in the forward that has a gradient.

    Args:
        agent_id: the agent of the run that these weights are.
        model: a path or Hugging Face id that `load_model` knows, or a loaded model, which is then trained
            as it is: `dtype` and `lora` do not touch it.
        lora: `r`, `alpha`, `dropout`, `target_modules` of a new adapter; None trains all weights.
        lr: the highest learning rate; see `lr_factor` for its course over `max_steps` rollout steps.
        grad_clip: largest gradient norm; 0 clips nothing.
        mini_batch_size: actions per optimizer step.
        micro_batch_size: sequences per forward; the result does not depend on it.
        micro_batch_tokens: tokens per forward, padding counted; None sets no such limit.
        rollout_correction: cap of the weight exp(old − rollout) per token; None weighs nothing.
        logprob_chunk_size: tokens whose vocabulary row is alive at a time.
        max_skipped_steps: so many optimizer steps in a row without a finite loss and gradient end the run.
        seed: of a new adapter's weights, and of dropout.

    Raises:
        ConfigError: an option has a value that is not allowed.
        NotAvailableError: a documented option that is not built.
    """

    def __init__(
        self,
        agent_id: str,
        model: str | PreTrainedModel | PeftModel,
        dtype: str = "float32",
        lora: dict[str, Any] | None = None,
        gradient_checkpointing: bool = False,
        lr: float = 1e-6,
        betas: Sequence[float] = (0.9, 0.95),
        weight_decay: float = 0.0,
        warmup_ratio: float = 0.03,
        min_lr_ratio: float = 0.1,
        grad_clip: float = 1.0,
        mini_batch_size: int = 16,
        micro_batch_size: int = 16,
        micro_batch_tokens: int | None = None,
        policy_loss: str = "ppo",
        loss_agg_mode: str = "token-mean",
        clip_ratio_low: float = 0.2,
        clip_ratio_high: float = 0.2,
        dual_clip: float | None = None,
        rollout_correction: float | None = None,
        logprob_chunk_size: int = 1024,
        max_skipped_steps: int = 3,
        max_steps: int = 30,
        seed: int = 0,
    ) -> None:
        super().__init__()
        _check_at_least_one(mini_batch_size=mini_batch_size, max_skipped_steps=max_skipped_steps, max_steps=max_steps)
        self.save_hyperparameters(ignore=[] if isinstance(model, str) else ["model"])
        self.automatic_optimization = False
        self.agent_id = agent_id
        self.lr = lr
        self.betas = (betas[0], betas[1])
        self.weight_decay = weight_decay
        self.mini_batch_size = mini_batch_size
        self.size = ForwardSize(sequences=micro_batch_size, tokens=micro_batch_tokens, head_tokens=logprob_chunk_size)
        self.grad_clip = grad_clip or math.inf
        self.max_skipped_steps = max_skipped_steps
        self.loss = PolicyLoss(
            name=policy_loss,
            loss_agg_mode=loss_agg_mode,
            clip_ratio_low=clip_ratio_low,
            clip_ratio_high=clip_ratio_high,
            dual_clip=dual_clip,
            rollout_correction=rollout_correction,
        )
        self._lr_factor = functools.partial(
            lr_factor, max_steps=max_steps, warmup_ratio=warmup_ratio, min_lr_ratio=min_lr_ratio
        )
        self._skipped_in_row = 0
        self._seed = seed
        if isinstance(model, str):
            model = load_model(model, dtype=dtype)
            if lora is not None:
                model = add_adapter(model, seed=seed, **lora)
        if gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        self.vocab_size = int(model.get_input_embeddings().weight.shape[0])  # type: ignore[index]
        self.policy = TokenLogProbs(model)
        self.strict_loading = not self._frozen_names()

    @property
    def model(self) -> PreTrainedModel | PeftModel:
        return self.policy.model

    @override
    def forward(self, *args: Any, **kwargs: Any) -> LogProbs:
        """As `TokenLogProbs`: what a strategy wraps."""
        log_probs: LogProbs = self.policy(*args, **kwargs)
        return log_probs

    # -- what Lightning asks ---------------------------------------------------------------------------

    @override
    def setup(self, stage: str) -> None:
        """Raises `ConfigError` without a datamodule that has a line to a run, or for ranks that share nothing."""
        if stage == "fit":
            rollout_data(self.trainer)
        strategy = self.trainer.strategy
        if self.trainer.world_size > 1 and not isinstance(strategy, ZeroStrategy):
            raise ConfigError(
                f"{self.trainer.world_size} ranks train one agent under {type(strategy).__name__}; "
                "allowed for more than one: ZeroStrategy"
            )

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW, without weight decay for norms and biases, at the learning rate of the first rollout step."""
        trained = [p for p in self.parameters() if p.requires_grad]
        groups: list[dict[str, Any]] = [
            {"params": [p for p in trained if p.ndim > 1], "weight_decay": self.weight_decay, "name": "decay"},
            {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0, "name": "no_decay"},
        ]
        return torch.optim.AdamW(
            [group for group in groups if group["params"]], lr=self.lr * self._lr_factor(0), betas=self.betas
        )

    @override
    def on_fit_start(self) -> None:
        self.model.train()  # Lightning warns of modules that enter training in eval mode

    @override
    def on_train_start(self) -> None:
        self.model.eval()
        # A resumed run may have more steps to go than the one whose optimizer state has just been restored.
        self._set_learning_rate(self._link.first_step)

    @override
    def training_step(self, batch: ExperienceBatch, batch_idx: int) -> None:
        # 1. What the policy that starts this step says of the sampled tokens.
        batch.old_log_probs_BT, entropy_BT = self.log_probs(batch, with_entropy=True)

        # 2. KL sums out, credit formed over all agents back.
        stats = finite_stats(batch)
        credits = self._link.exchange(batch.step, stats, batch.kl_coef)
        batch.advantages_BT = advantages(batch, credits)
        trained = [row for row, e in enumerate(batch) if credits[e.key].masked is None]

        # 3. One optimizer step per mini-batch, cut in episode order; dropout is drawn for this step and rank.
        torch.manual_seed(derive_seed(self._seed, self.agent_id, batch.step, self.global_rank))
        update = self._policy_update()
        updates = [
            self._counted(update(batch.select(rows)), "loss or gradient") for rows in cut(trained, self.mini_batch_size)
        ]
        if len(stats) < int(batch.response_mask_BT.any(1).sum()):
            updates.append(self._counted(Update(status="skipped", n_actions=0, n_tokens=0), "log-probs"))
        if not updates:
            updates.append(Update(status="empty", n_actions=0, n_tokens=0))

        # 4. What came of it.
        metrics = batch_metrics(batch, entropy_BT, trained) | update_metrics(updates)
        metrics["lr"] = self.optimizers().param_groups[0]["lr"]  # type: ignore[union-attr]
        self.log("step", float(batch.step), batch_size=1)
        self.log_dict({f"train/{name}": value for name, value in metrics.items()}, batch_size=1)
        self._link.report(batch.step, metrics)

        # 5. Lightning steps no scheduler here, and LearningRateMonitor looks before the next step.
        self._set_learning_rate(batch.step + 1)

    @override
    def validation_step(self, batch: Mapping[str, float], batch_idx: int) -> None:
        self.log("step", float(rollout_data(self.trainer).version), batch_size=1)
        self.log_dict({f"val/{name}": float(value) for name, value in batch.items()}, batch_size=1)

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Frozen weights stay out: they are where `model` came from."""
        checkpoint[_SKIPPED_IN_ROW] = self._skipped_in_row
        for name in self._frozen_names():
            checkpoint["state_dict"].pop(name, None)

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._skipped_in_row = checkpoint[_SKIPPED_IN_ROW]
        if "state_dict" not in checkpoint:
            return  # sharded: DeepSpeed has loaded and checked its own
        trained = {name for name, p in self.named_parameters() if p.requires_grad}
        if missing := trained - checkpoint["state_dict"].keys():
            raise DataError(f"the checkpoint lacks {len(missing)} trained tensors, such as {min(missing)}")

    def _set_learning_rate(self, step: int) -> None:
        for group in self.optimizers().param_groups:  # type: ignore[union-attr]
            group["lr"] = self.lr * self._lr_factor(step)

    # -- the parts of a step ---------------------------------------------------------------------------

    def log_probs(self, batch: ExperienceBatch, *, with_entropy: bool = False) -> LogProbs:
        """[B, T] of the current weights without a graph, in micro-batches; 0 outside the response.

        The same on every rank, and asked of every rank alike.
        """
        return forward_in_pieces(
            self._wrapped,
            batch,
            self.size,
            ranks_of(self.trainer),
            dtype=torch.promote_types(next(self.parameters()).dtype, torch.float32),
            with_entropy=with_entropy,
        )

    def full_tensors(self) -> WholeTensors:
        """What training changes, whole, one tensor at a time; the names are those of `trained_tensors`.

        To be read by every rank alike, to its end.
        """
        release(self.trainer)
        return WholeTensors(trained_parameters(self.model))

    def fingerprint(self) -> Fingerprint:
        """What the current weights say after a fixed prompt; asked of every rank alike."""
        training = self.model.training
        self.model.eval()  # a restored run is asked before its training starts
        probe = probe_ids(self.vocab_size, context_length(self.model, None))
        fingerprint = fingerprint_of(self._wrapped, *probe, self.size, self.device)
        self.model.train(training)
        return fingerprint

    def _policy_update(self) -> PolicyUpdate:
        return PolicyUpdate(
            policy=self._wrapped,
            model=self.model,
            loss=self.loss,
            size=self.size,
            ranks=ranks_of(self.trainer),
            begin=functools.partial(optimizer_step, self, self.grad_clip),
        )

    def _counted(self, update: Update, what: str) -> Update:
        """The update; raises `NumericError` when it is one skipped too many in a row."""
        if update.status == "stepped":
            self._skipped_in_row = 0
        elif update.status == "skipped":
            self._skipped_in_row += 1
        if self._skipped_in_row >= self.max_skipped_steps:
            raise NumericError(
                f"agent {self.agent_id}: {what} not finite, {self._skipped_in_row} optimizer steps in a row"
            )
        return update

    @property
    def _wrapped(self) -> Policy:
        """The policy as the strategy has wrapped it; this module itself where it does not."""
        wrapped: Policy = self.trainer.model  # type: ignore[assignment]
        return wrapped

    def _frozen_names(self) -> set[str]:
        return {name for name, p in self.named_parameters(remove_duplicate=False) if not p.requires_grad}

    @property
    def _link(self) -> AgentLink:
        return rollout_data(self.trainer).link


def _check_at_least_one(**sizes: int) -> None:
    for key, size in sizes.items():
        if size < 1:
            raise ConfigError(f"{key} is {size}; allowed: at least 1")
