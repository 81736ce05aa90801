"""Brings new weights to the engine that samples with them."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lightning_mappa.datamodules.rollout import rollout_data
from lightning_mappa.errors import ConfigError
from lightning_mappa.module import AgentModule
from lightning_mappa.types import ExperienceBatch


class WeightSync(Callback):
    """After every rollout step, pushes the agent's trained tensors to the run as the next policy version.

    Also after a step that changed nothing: the version still goes up, and the run waits for it. The run stops
    when the engine then says something else than the trainer does (`Fingerprint`). A resumed run also pushes
    what was restored, before its first step: the engine starts with the weights of version 0.

    Raises:
        ConfigError: in `setup`, when the datamodule has no line to a run that takes weights.

    Example:
        >>> Trainer(max_epochs=1, callbacks=[WeightSync()])  # doctest: +SKIP
    """

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit" and not hasattr(rollout_data(trainer).link, "push_weights"):
            given = type(rollout_data(trainer)).__name__
            raise ConfigError(f"WeightSync needs a run that takes weights; the link of {given} takes none")

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        first_step = rollout_data(trainer).link.first_step
        if first_step > 0:
            self._push(trainer, pl_module, first_step)

    @override
    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: ExperienceBatch,
        batch_idx: int,
    ) -> None:
        self._push(trainer, pl_module, batch.step + 1)

    @staticmethod
    def _push(trainer: Trainer, pl_module: LightningModule, version: int) -> None:
        assert isinstance(pl_module, AgentModule)
        with trainer.precision_plugin.forward_context():
            fingerprint = pl_module.fingerprint()
        rollout_data(trainer).link.push_weights(version, pl_module.full_tensors(), fingerprint)
