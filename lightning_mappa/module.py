"""One agent under training, as a LightningModule."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel
from typing_extensions import override

from lightning_mappa.batch_credit import advantages, finite_stats
from lightning_mappa.datamodules.rollout import rollout_data
from lightning_mappa.errors import ConfigError, DataError, NotAvailableError, NumericError
from lightning_mappa.microbatch import cut, forward, forward_in_pieces, gradient_mode
from lightning_mappa.models.load import add_adapter, context_length, load_model, trained_tensors
from lightning_mappa.policy import LogProbs, TokenLogProbs
from lightning_mappa.policy_loss import PolicyLoss
from lightning_mappa.rollout.fingerprint import Fingerprint, probe_ids
from lightning_mappa.runtime.base import AgentLink
from lightning_mappa.schedule import lr_factor
from lightning_mappa.step_metrics import Update, batch_metrics, update_metrics
from lightning_mappa.types import ExperienceBatch

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
        rollout_correction: cap of the weight exp(old − rollout) per token; None weighs nothing.
        logprob_chunk_size: tokens whose vocabulary row is alive at a time.
        max_skipped_steps: so many optimizer steps in a row without a finite loss and gradient end the run.
        seed: of a new adapter's weights.

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
        _check_at_least_one(
            mini_batch_size=mini_batch_size,
            micro_batch_size=micro_batch_size,
            logprob_chunk_size=logprob_chunk_size,
            max_skipped_steps=max_skipped_steps,
            max_steps=max_steps,
        )
        self.save_hyperparameters(ignore=[] if isinstance(model, str) else ["model"])
        self.automatic_optimization = False
        self.agent_id = agent_id
        self.lr = lr
        self.betas = (betas[0], betas[1])
        self.weight_decay = weight_decay
        self.mini_batch_size = mini_batch_size
        self.micro_batch_size = micro_batch_size
        self.grad_clip = grad_clip or math.inf
        self.logprob_chunk_size = logprob_chunk_size
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
        if isinstance(model, str):
            model = load_model(model, dtype=dtype)
            if lora is not None:
                model = add_adapter(model, seed=seed, **lora)
        if gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        self.policy = TokenLogProbs(model)
        self.strict_loading = not self._frozen_names()

    @property
    def model(self) -> PreTrainedModel | PeftModel:
        return self.policy.model

    @property
    def vocab_size(self) -> int:
        return int(self.model.get_input_embeddings().weight.shape[0])  # type: ignore[index]

    # -- what Lightning asks ---------------------------------------------------------------------------

    @override
    def setup(self, stage: str) -> None:
        """Raises `ConfigError` without a datamodule that has a line to a run, or with several ranks."""
        if stage == "fit":
            rollout_data(self.trainer)
        if self.trainer.world_size > 1:
            raise NotAvailableError(f"{self.trainer.world_size} ranks for one agent are not available")

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW, without weight decay for norms and biases, at the learning rate of the first rollout step."""
        decay = [p for p in self.parameters() if p.requires_grad and p.ndim > 1]
        no_decay = [p for p in self.parameters() if p.requires_grad and p.ndim <= 1]
        groups: list[dict[str, Any]] = [
            {"params": decay, "weight_decay": self.weight_decay, "name": "decay"},
            {"params": no_decay, "weight_decay": 0.0, "name": "no_decay"},
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

        # 3. One optimizer step per mini-batch, cut in episode order.
        updates = [self._update(batch.select(rows)) for rows in cut(trained, self.mini_batch_size)]
        if len(stats) < int(batch.response_mask_BT.any(1).sum()):
            updates.append(self._skip("log-probs", n_actions=0, n_tokens=0))
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
        trained = {name for name, p in self.named_parameters() if p.requires_grad}
        if missing := trained - checkpoint["state_dict"].keys():
            raise DataError(f"the checkpoint lacks {len(missing)} trained tensors, such as {min(missing)}")

    def _set_learning_rate(self, step: int) -> None:
        for group in self.optimizers().param_groups:  # type: ignore[union-attr]
            group["lr"] = self.lr * self._lr_factor(step)

    # -- the parts of a step ---------------------------------------------------------------------------

    def log_probs(self, batch: ExperienceBatch, *, with_entropy: bool = False) -> LogProbs:
        """[B, T] of the current weights without a graph, in micro-batches; 0 outside the response."""
        return forward_in_pieces(
            self.policy,
            batch,
            self.logprob_chunk_size,
            micro_batch_size=self.micro_batch_size,
            with_entropy=with_entropy,
        )

    def full_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """What training changes, whole, one tensor at a time; the names are those of `trained_tensors`.

        To be read by every rank alike.
        """
        yield from trained_tensors(self.model).items()

    def fingerprint(self) -> Fingerprint:
        """What the current weights say after a fixed prompt; asked of every rank alike."""
        prompt_ids, token_ids = probe_ids(self.vocab_size, context_length(self.model, None))
        batch = torch.tensor([[*prompt_ids, token] for token in token_ids], device=self.device)
        select_BT = torch.zeros_like(batch, dtype=torch.bool)
        select_BT[:, -1] = True
        training = self.model.training
        self.model.eval()  # a restored run is asked before its training starts
        with torch.no_grad():
            log_probs_BT = self.policy(
                batch,
                torch.ones_like(select_BT),
                select_BT=select_BT,
                temperature=1.0,
                chunk_size=self.logprob_chunk_size,
            ).log_probs_BT
        self.model.train(training)
        return Fingerprint(
            prompt_ids=prompt_ids, token_ids=token_ids, log_probs=tuple(log_probs_BT[:, -1].float().tolist())
        )

    def _update(self, batch: ExperienceBatch) -> Update:
        """One optimizer step on a mini-batch, if anything in it has an advantage and all is finite."""
        assert batch.advantages_BT is not None
        size = {"n_actions": len(batch), "n_tokens": int(batch.response_mask_BT.sum())}
        if not bool(batch.advantages_BT.any()):
            return Update(status="empty", **size)  # AdamW would move on a zero gradient

        optimizer = self.optimizers()
        optimizer.zero_grad()  # type: ignore[union-attr]
        denominator = self.loss.denominator(batch)
        parts = [
            self._backward(batch.select(rows), denominator) for rows in cut(range(len(batch)), self.micro_batch_size)
        ]
        loss, n_clipped, kl_sum = (sum(column) for column in zip(*parts, strict=True))
        trained = [p for p in self.parameters() if p.requires_grad]
        grad_norm = float(nn.utils.clip_grad_norm_(trained, self.grad_clip))

        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            optimizer.zero_grad()  # type: ignore[union-attr]
            return self._skip("loss or gradient", **size)
        optimizer.step()  # type: ignore[union-attr]
        optimizer.zero_grad()  # type: ignore[union-attr]
        self._skipped_in_row = 0
        return Update(status="stepped", loss=loss, grad_norm=grad_norm, n_clipped=int(n_clipped), kl_sum=kl_sum, **size)

    def _backward(self, batch: ExperienceBatch, denominator: int) -> tuple[float, int, float]:
        """Adds a micro-batch's share to the gradient; returns loss, clipped tokens and sum of old − new."""
        assert batch.old_log_probs_BT is not None
        with gradient_mode(self.model):
            log_probs_BT = forward(self.policy, batch, self.logprob_chunk_size).log_probs_BT
            loss, clipped_BT = self.loss.share(log_probs_BT, batch, denominator)
            self.manual_backward(loss)
        kl_sum = (batch.old_log_probs_BT - log_probs_BT.detach()).sum()
        return float(loss.detach()), int(clipped_BT.sum()), float(kl_sum)

    def _skip(self, what: str, *, n_actions: int, n_tokens: int) -> Update:
        self._skipped_in_row += 1
        if self._skipped_in_row >= self.max_skipped_steps:
            raise NumericError(
                f"agent {self.agent_id}: {what} not finite, {self._skipped_in_row} optimizer steps in a row"
            )
        return Update(status="skipped", n_actions=n_actions, n_tokens=n_tokens)

    def _frozen_names(self) -> set[str]:
        return {name for name, p in self.named_parameters(remove_duplicate=False) if not p.requires_grad}

    @property
    def _link(self) -> AgentLink:
        return rollout_data(self.trainer).link


def _check_at_least_one(**sizes: int) -> None:
    for key, size in sizes.items():
        if size < 1:
            raise ConfigError(f"{key} is {size}; allowed: at least 1")
