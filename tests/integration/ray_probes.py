"""Callbacks that do harm, in the processes of a run's parts."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
from lightning.pytorch import Callback

from tests.processes import named


class SignalOnce(Callback):
    """Sends this process a signal in step 1, the first time that a file `marker` is not there."""

    def __init__(self, number: int, marker: str | None = None, rank: int = 0) -> None:
        self._number = number
        self._rank = rank
        self._marker = None if marker is None else Path(marker)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_rank != self._rank:
            return
        if batch.step == 1 and (self._marker is None or not self._marker.exists()):
            if self._marker is not None:
                self._marker.touch()
            os.kill(os.getpid(), self._number)


class KillEngine(Callback):
    """Kills the engine's process after step 0, when its weights are those of the start."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch.step == 0:
            actors = named(psutil.Process().parent().children(recursive=True))  # the parent is Ray's raylet
            engines = [process for name, process in actors if name.startswith("ray::Transforme")]
            assert len(engines) == 1, [name for name, _ in actors]
            engines[0].kill()


class Bug(Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        1 / 0  # noqa: B018
