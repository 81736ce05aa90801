"""Holds a policy near the one it started as."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from typing_extensions import override

from lightning_mappa.algorithm.choices import check_choice
from lightning_mappa.algorithm.kl import (
    AdaptiveKLController,
    FixedKLController,
    KLController,
    check_kl_placement,
)
from lightning_mappa.batch_credit import kl_to_reference
from lightning_mappa.errors import ConfigError, NotAvailableError, NumericError
from lightning_mappa.module import AgentModule
from lightning_mappa.strategies.zero import release, shard
from lightning_mappa.types import ExperienceBatch


class KLPenalty(Callback):
    """Charges each action beta times its KL to the reference: the policy at step 0, also after resume.

    Before each step it fills the batch's reference log-probs and its coefficient; after each step the
    adaptive coefficient follows the measured KL. The reference is a copy of the trained tensors alone (with
    LoRA, of the adapter; under ZeRO-3, of this rank's shards), taken before Lightning restores a checkpoint. It
    lies outside the LightningModule, so it is in no checkpoint, export or sync.

    Args:
        kl_coef: beta, or where an adaptive one starts.
        kind: `fixed` or `adaptive`.
        kl_target: adaptive: nats per token to steer to.
        kl_horizon: adaptive: the number of actions over which the coefficient follows.
        estimator: with `placement`: k1 in the reward; k2 as a loss is not available.
        max_kl: ends the run when the mean over tokens of a step is above; None never does.

    Raises:
        ConfigError: a value that is not allowed, or a pair of estimator and placement with a wrong gradient.
        NumericError: the KL ran away.

    Example:
        >>> Trainer(callbacks=[KLPenalty(kl_coef=0.01)])  # doctest: +SKIP
    """

    def __init__(
        self,
        kl_coef: float = 0.01,
        kind: str = "fixed",
        kl_target: float | None = None,
        kl_horizon: float | None = None,
        estimator: str = "k1",
        placement: str = "reward",
        max_kl: float | None = None,
    ) -> None:
        check_kl_placement(estimator, placement)
        if placement == "loss":
            raise NotAvailableError("KLPenalty(placement='loss') is not available; allowed: reward")
        self.controller = _controller(kl_coef, kind, kl_target, kl_horizon)
        self.max_kl = max_kl
        self._reference: dict[str, Tensor] = {}

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit" and not trainer.strategy.restore_checkpoint_after_setup:
            self._reference = _copies(pl_module)

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.strategy.restore_checkpoint_after_setup:
            self._reference = _copies(pl_module)  # weights are sharded by now, and not restored yet

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._reference = {}

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: ExperienceBatch, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, AgentModule)
        batch.kl_coef = self.controller.coef
        # The precision of the training step, which this hook lies outside of: else KL is not 0 at step 0.
        with trainer.precision_plugin.forward_context(), _holding(pl_module, self._reference):
            batch.ref_log_probs_BT = pl_module.log_probs(batch).log_probs_BT

    @override
    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: ExperienceBatch,
        batch_idx: int,
    ) -> None:
        assert isinstance(pl_module, AgentModule)
        if not bool(batch.response_mask_BT.any()):
            return
        kl = float(kl_to_reference(batch)[batch.response_mask_BT].double().mean())
        if self.is_runaway(kl):
            raise NumericError(
                f"agent {pl_module.agent_id}: KL to the reference is {kl:.3g} nats per token in step "
                f"{batch.step}, above max_kl={self.max_kl}"
            )
        self.controller.update(kl, n_steps=int(batch.response_mask_BT.any(1).sum()))

    def is_runaway(self, kl: float) -> bool:
        """Whether a step's mean KL per token, in nats, ends the run."""
        return self.max_kl is not None and not kl <= self.max_kl

    @override
    def state_dict(self) -> dict[str, Any]:
        return self.controller.state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.controller.load_state_dict(state_dict)


def _controller(coef: float, kind: str, target: float | None, horizon: float | None) -> KLController:
    check_choice("kind of KLPenalty", kind, ("fixed", "adaptive"))
    if kind == "fixed":
        if (target, horizon) != (None, None):
            raise ConfigError("KLPenalty: kl_target and kl_horizon are for kind=adaptive; given kind=fixed")
        return FixedKLController(coef)
    if target is None or horizon is None:
        raise ConfigError(f"KLPenalty(kind='adaptive') needs kl_target and kl_horizon; given {target} and {horizon}")
    return AdaptiveKLController(coef, target, horizon)


def _copies(pl_module: LightningModule) -> dict[str, Tensor]:
    assert isinstance(pl_module, AgentModule)
    return {name: shard(p).detach().clone() for name, p in pl_module.model.named_parameters() if p.requires_grad}


@contextmanager
def _holding(pl_module: AgentModule, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """The model with other values in its parameters or shards, which get their own back on the way out."""
    shards = {name: shard(p) for name, p in pl_module.model.named_parameters() if name in tensors}
    own = {name: one.data for name, one in shards.items()}
    release(pl_module.trainer)
    try:
        for name, one in shards.items():
            one.data = tensors[name].to(device=one.device, dtype=one.dtype)
        yield
    finally:
        release(pl_module.trainer)
        for name, one in shards.items():
            one.data = own[name]
        torch.clear_autocast_cache()
