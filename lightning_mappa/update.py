"""One optimizer step on one mini-batch, however it is cut and over however many ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor, nn

from lightning_mappa.microbatch import ForwardSize, Policy, forward, gradient_mode, padding
from lightning_mappa.policy_loss import PolicyLoss
from lightning_mappa.ranks import Ranks
from lightning_mappa.step_metrics import Update
from lightning_mappa.types import ExperienceBatch


class OptimizerStep(Protocol):
    """What becomes of the gradient of one mini-batch."""

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Adds to the gradient, which is averaged over ranks. `last`: nothing more comes before the step."""
        ...

    def take(self) -> float:
        """Clips and steps, and clears the gradient; returns its norm over all ranks, before clipping.

        A norm that is not finite changes neither weights nor the optimizer's state, on any rank.
        """
        ...


class PlainStep:
    """With a torch optimizer, in one process.

    Args:
        grad_clip: largest gradient norm; `inf` clips nothing.
    """

    def __init__(self, module: LightningModule, grad_clip: float) -> None:
        self._module = module
        self._grad_clip = grad_clip
        self._optimizer = the_optimizer(module)
        self._optimizer.zero_grad()

    def backward(self, loss: Tensor, *, last: bool) -> None:
        self._module.manual_backward(loss)

    def take(self) -> float:
        trained = [p for p in self._module.parameters() if p.requires_grad]
        norm = float(nn.utils.clip_grad_norm_(trained, self._grad_clip))
        if math.isfinite(norm):
            self._optimizer.step()
        self._optimizer.zero_grad()
        return norm


def the_optimizer(module: LightningModule) -> LightningOptimizer:
    """The module's only one."""
    optimizer = module.optimizers()
    assert isinstance(optimizer, LightningOptimizer)
    return optimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyUpdate:
    """The parts of an optimizer step that are the same for every mini-batch of a rollout step."""

    policy: Policy
    model: nn.Module
    loss: PolicyLoss
    size: ForwardSize
    ranks: Ranks
    begin: Callable[[], OptimizerStep]

    def __call__(self, batch: ExperienceBatch) -> Update:
        """Steps, if anything in the mini-batch has an advantage and all is finite. Asked of every rank alike."""
        assert batch.advantages_BT is not None
        n_tokens = int(batch.response_mask_BT.sum())
        if not bool(batch.advantages_BT.any()):
            return Update(status="empty", n_actions=len(batch), n_tokens=n_tokens)  # AdamW moves on a zero gradient

        step = self.begin()
        denominator = self.loss.denominator(batch)
        sums_3 = torch.zeros(3, dtype=torch.float64, device=batch.input_ids_BT.device)
        dealt = self.ranks.deal(self.size.cut(batch))
        for number, rows in enumerate(dealt, start=1):
            last = number == len(dealt)
            with gradient_mode(self.model):
                share = self._share(batch, rows, denominator, sums_3)
                if last:
                    sums_3 = self.ranks.total(sums_3)
                    if not bool(sums_3[0].isfinite()):
                        share = share * math.nan  # of whichever rank: then none of them steps
                step.backward(share * self.ranks.size, last=last)
        grad_norm = step.take()

        if not math.isfinite(grad_norm):
            return Update(status="skipped", n_actions=len(batch), n_tokens=n_tokens)
        loss, n_clipped, kl_sum = sums_3.tolist()
        return Update(
            status="stepped",
            n_actions=len(batch),
            n_tokens=n_tokens,
            loss=loss,
            grad_norm=grad_norm,
            n_clipped=int(n_clipped),
            kl_sum=kl_sum,
        )

    def _share(self, batch: ExperienceBatch, rows: Sequence[int], denominator: int, sums_3: Tensor) -> Tensor:
        """The rows' share of the loss, with its graph; to `sums_3` go its value, clipped tokens, and old − new."""
        if not rows:
            log_probs_BT = forward(self.policy, padding(batch), self.size).log_probs_BT
            return torch.where(torch.zeros_like(log_probs_BT, dtype=torch.bool), log_probs_BT, 0.0).sum()
        part = batch.select(rows)
        assert part.old_log_probs_BT is not None
        log_probs_BT = forward(self.policy, part, self.size).log_probs_BT
        share, clipped_BT = self.loss.share(log_probs_BT, part, denominator)
        gap_BT = part.old_log_probs_BT - log_probs_BT.detach()
        sums_3 += torch.stack([share.detach().double(), clipped_BT.sum().double(), gap_BT.sum().double()])
        return share
