"""Callbacks, coaches and workflows that tests put into a run by their import path."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_mappa.coaches.rules import RulesCoach
from lightning_mappa.types import Episode, Verdict
from lightning_mappa.workflows.sequential import SequentialWorkflow

TRAINED: dict[tuple[str, int], tuple[tuple[int, ...], tuple[int, ...]]] = {}
"""(episode id, index) → (prompt ids, response ids) as they stood in a train batch."""


class NoteTrainedIds(Callback):
    """Reads the ids back out of the tensors that `training_step` is given."""

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        for row, experience in enumerate(batch):
            mask = batch.response_mask_BT[row]
            context = batch.attention_mask_BT[row] & ~mask
            assert not bool(mask[: int(context.sum())].any())
            TRAINED[experience.key] = (
                tuple(batch.input_ids_BT[row, context].tolist()),
                tuple(batch.input_ids_BT[row, mask].tolist()),
            )


class Breaks(Callback):
    """A callback with a bug."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if pl_module.agent_id == "executor":
            raise ZeroDivisionError("division by zero")


class SignalSelf(Callback):
    """Sends this process a signal once the batch of `step` is done."""

    def __init__(self, step: int, signum: int = signal.SIGTERM) -> None:
        self.step = step
        self.signum = signum

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch.step == self.step and pl_module.agent_id == "solver":
            os.kill(os.getpid(), self.signum)


class SignalAtStart(Callback):
    """Sends this process a signal before the first batch."""

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        if pl_module.agent_id == "solver":
            os.kill(os.getpid(), signal.SIGTERM)


class SignalInRollout(SequentialWorkflow):
    """Sends this process a signal in the middle of its `after`-th training episode."""

    played = 0

    def __init__(self, after: int, **settings: Any) -> None:
        super().__init__(**settings)
        self._after = after

    async def run(self, task: Any, agents: Any) -> str:
        type(self).played += 1
        if type(self).played == self._after:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(20)  # another thread has to notice; the episode is cut long before
        return await super().run(task, agents)


class FailSome(SequentialWorkflow):
    """Loses every third episode after its first agent has acted."""

    count = 0

    async def run(self, task: Any, agents: Any) -> str:
        type(self).count += 1
        if type(self).count % 3 == 0:
            await agents["solver"].act(task, ())
            raise RuntimeError("lost")
        return await super().run(task, agents)


class ForgetSome(RulesCoach):
    """Has no verdict on every fifth action it is asked about."""

    def __init__(self) -> None:
        self.count = 0

    async def score(self, episode: Episode, index: int) -> Verdict:
        self.count += 1
        if self.count % 5 == 0:
            return Verdict(score=None, reason="forgotten", coach="forgetful")
        return await super().score(episode, index)


class Silent:
    """Has no verdict on anything."""

    name = "silent"

    async def score(self, episode: Episode, index: int) -> Verdict:
        return Verdict(score=None, reason="out of order", coach=self.name)


class StopOne(Callback):
    """One agent's Trainer has had enough after its batch of `step`; Lightning then validates at once."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if pl_module.agent_id == "solver" and batch.step == self.step:
            trainer.should_stop = True
