"""One agent's stream of scored rollout batches, and the system's evaluation between them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, Trainer
from typing_extensions import override

from lightning_mappa.datamodules.collate import collate
from lightning_mappa.errors import ConfigError, DataError, RunEnded
from lightning_mappa.runtime.base import AgentLink
from lightning_mappa.types import Experience, ExperienceBatch, MaskReason


class RolloutDataModule(LightningDataModule):
    """`train_dataloader` yields one `ExperienceBatch` per policy version, `val_dataloader` one evaluation.

    A Lightning epoch is the whole run: `Trainer(max_epochs=1)`, and `batch_idx` is the rollout step.

    Attributes:
        link: this agent's line to the run.
        last_batch: the batch trained on last, for callbacks; None before the first.
        version: completed rollout steps, counting the step whose batch was handed out last.
    """

    def __init__(self, link: AgentLink) -> None:
        super().__init__()
        self.link = link
        self.version = link.first_step
        self.last_batch: ExperienceBatch | None = None

    @override
    def setup(self, stage: str) -> None:
        """Raises `ConfigError` where Lightning's own limits would count something else than rollout steps."""
        assert self.trainer is not None
        if stage == "fit" and self.trainer.max_steps != -1:
            raise ConfigError(
                f"Trainer(max_steps={self.trainer.max_steps}) counts optimizer steps; "
                "leave it at -1 and set the rollout steps of the run"
            )
        if stage == "fit" and self.trainer.max_epochs != 1:
            raise ConfigError(f"Trainer(max_epochs={self.trainer.max_epochs}): must be 1, an epoch is the run")

    @override
    def train_dataloader(self) -> RolloutStream:
        return RolloutStream(self)

    @override
    def val_dataloader(self) -> EvaluationStream:
        return EvaluationStream(self)

    @override
    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return batch.to(device) if isinstance(batch, ExperienceBatch) else batch

    @override
    def teardown(self, stage: str) -> None:
        if stage == "fit":
            self.link.leave()

    @override
    def on_exception(self, exception: BaseException) -> None:
        self.link.leave(exception)

    def next_batch(self) -> ExperienceBatch:
        """The next rollout step's batch, after saving the checkpoint that is due before it.

        Raises `RunEnded` when no such step will come, after saving the one that was asked for meanwhile.
        """
        step = self.version
        self._save_checkpoint(step)
        assert self.trainer is not None
        vocab_size = int(self.trainer.lightning_module.vocab_size)  # type: ignore[arg-type]
        try:
            experiences = [validated(e, self.link.agent_id, vocab_size) for e in self.link.experience(step)]
        except RunEnded:
            self._save_checkpoint(step)
            raise
        self.last_batch = collate(experiences, step)
        self.version = step + 1
        return self.last_batch

    def _save_checkpoint(self, step: int) -> None:
        """Here, between two batches, the loops' progress says exactly "after step − 1"."""
        path = self.link.checkpoint_path(step)
        if path is not None:
            assert self.trainer is not None
            self.trainer.save_checkpoint(path)
            self.link.checkpoint_saved(step)


class RolloutStream:
    """The training batches of a run, in order.

    It has a length because Lightning fetches one batch ahead from an iterable without: on-policy, that waits
    for ever. It has a state because Lightning asks a resumable loader for one.
    """

    def __init__(self, datamodule: RolloutDataModule) -> None:
        self._datamodule = datamodule

    def __len__(self) -> int:
        return self._datamodule.link.max_steps

    def __iter__(self) -> Iterator[ExperienceBatch]:
        while self._datamodule.version < len(self):
            try:
                batch = self._datamodule.next_batch()
            except RunEnded:
                return
            yield batch

    def state_dict(self) -> dict[str, int]:
        return {"step": self._datamodule.version}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Raises `DataError` when the checkpoint is not of the step that the run goes on with."""
        if state_dict["step"] != self._datamodule.version:
            raise DataError(
                f"the checkpoint was saved before step {state_dict['step']}, "
                f"the run goes on with step {self._datamodule.version}"
            )


class EvaluationStream:
    """One item: the system's evaluation at the datamodule's version."""

    def __init__(self, datamodule: RolloutDataModule) -> None:
        self._datamodule = datamodule

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[Mapping[str, float]]:
        yield self._datamodule.link.evaluation(self._datamodule.version)


def rollout_data(trainer: Trainer) -> RolloutDataModule:
    """The Trainer's datamodule. Raises `ConfigError` when it is none with a line to a run."""
    datamodule = trainer.datamodule  # type: ignore[attr-defined]
    if not isinstance(datamodule, RolloutDataModule):
        raise ConfigError(f"the Trainer's datamodule must be a RolloutDataModule; given: {type(datamodule).__name__}")
    return datamodule


def validated(experience: Experience, agent_id: str, vocab_size: int) -> Experience:
    """The experience, or in its place a one-token row masked as `invalid` that does no harm in a forward."""
    if _is_sound(experience, agent_id, vocab_size):
        return experience
    return dataclasses.replace(
        experience,
        masked=MaskReason.INVALID,
        prompt_ids=(0,),
        response_ids=(),
        rollout_log_probs=(),
    )


def _is_sound(e: Experience, agent_id: str, vocab_size: int) -> bool:
    return (
        e.agent_id == agent_id
        and len(e.rollout_log_probs) == len(e.response_ids)
        and len(e.prompt_ids) > 0
        and (len(e.response_ids) > 0 or e.masked is not None)
        and all(0 <= token < vocab_size for token in e.prompt_ids + e.response_ids)
        and all(math.isfinite(value) for value in e.rollout_log_probs)
    )
