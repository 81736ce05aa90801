"""Keeps the weights of the version that did best on the selection split."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lightning_mappa.callbacks.last_tensors import save_whole
from lightning_mappa.datamodules.rollout import rollout_data
from lightning_mappa.errors import ConfigError, DataError
from lightning_mappa.files import write_atomically
from lightning_mappa.module import AgentModule


class CheckpointSelection(Callback):
    """Keeps this agent's trained tensors of the best version so far, the untrained version 0 among them.

    Acts at the start of training and after every validation. The selection is joint because every agent sees
    the same evaluation of the whole system; ties go to the earlier version. `dirpath` then holds
    `selected.json` and the tensors that it names: of the selected version, and of the one selected before it,
    because an agent whose run breaks off earlier may not know of the last evaluation. Of several ranks all put
    the tensors together, and rank 0 writes.

    Args:
        monitor: a metric of the system's evaluation, as logged (`val/…`).
        mode: `max` or `min`.
        dirpath: None is the folder `selected` in the Trainer's own.

    Raises:
        ConfigError: for another mode, in `setup` on a recording, or when there is no such metric.
        DataError: at the start of training, when the selected tensors of the checkpoint gone on from are gone.

    Example:
        >>> Trainer(callbacks=[CheckpointSelection(monitor="val/success")])  # doctest: +SKIP
    """

    def __init__(self, monitor: str = "val/success", mode: str = "max", dirpath: str | Path | None = None) -> None:
        if mode not in ("max", "min"):
            raise ConfigError(f"CheckpointSelection(mode={mode!r}): allowed are max, min")
        self.dirpath = None if dirpath is None else Path(dirpath)
        self.monitor = monitor
        self.mode = mode
        self.selected_version: int | None = None
        """None before the first evaluation."""
        self.selected_value: float | None = None
        self._previous: int | None = None
        self._in_checkpoints: set[int | None] = set()

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit" and not hasattr(rollout_data(trainer).link, "evaluation"):
            raise ConfigError("CheckpointSelection needs a run that evaluates; a recorded one does not")
        if self.dirpath is None:
            self.dirpath = Path(trainer.default_root_dir) / "selected"

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.selected_version is not None:
            path = self._tensors(self.selected_version)
            if trainer.is_global_zero and not path.is_file():
                raise DataError(f"the selected weights {path} are gone")
            self._name(pl_module)  # after a resume the file may speak of versions that are made again
        if rollout_data(trainer).version == 0:
            self._consider(trainer, pl_module)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._consider(trainer, pl_module)

    def is_better(self, value: float, best: float | None) -> bool:
        """Whether a later version with `value` replaces one with `best`; never a value that is no number."""
        if math.isnan(value):
            return False
        return best is None or (value > best if self.mode == "max" else value < best)

    @override
    def state_dict(self) -> dict[str, Any]:
        self._in_checkpoints.add(self.selected_version)
        return {"selected_version": self.selected_version, "selected_value": self.selected_value}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.selected_version = state_dict["selected_version"]
        self.selected_value = state_dict["selected_value"]
        self._in_checkpoints.add(self.selected_version)

    def _consider(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """From the run itself: Lightning's own metrics are rounded to float32, which breaks ties."""
        data = rollout_data(trainer)
        metrics = {f"val/{name}": value for name, value in data.link.evaluation(data.version).items()}
        if self.monitor not in metrics and self.selected_version is None:
            known = ", ".join(sorted(metrics)) or "none"
            raise ConfigError(f"CheckpointSelection(monitor={self.monitor!r}): the evaluation has {known}")
        value = float(metrics.get(self.monitor, math.nan))
        if self.is_better(value, self.selected_value):
            self._keep(pl_module, data.version, value)

    def _keep(self, pl_module: LightningModule, version: int, value: float) -> None:
        """Tensors first, then the file that names them; old tensors go unless a checkpoint needs them."""
        assert isinstance(pl_module, AgentModule)
        old, self._previous = self._previous, self.selected_version
        self.selected_version, self.selected_value = version, value
        save_whole(pl_module, self._tensors(version), version=version, writes=pl_module.trainer.is_global_zero)
        self._name(pl_module)
        if old is not None and old not in self._in_checkpoints and pl_module.trainer.is_global_zero:
            self._tensors(old).unlink(missing_ok=True)

    def _name(self, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, AgentModule)
        assert self.dirpath is not None
        assert self.selected_version is not None
        if not pl_module.trainer.is_global_zero:
            return
        entry = {
            "agent_id": pl_module.agent_id,
            "version": self.selected_version,
            "monitor": self.monitor,
            "value": self.selected_value,
            "tensors": self._tensors(self.selected_version).name,
            "previous": None,
        }
        if self._previous is not None:
            entry["previous"] = {"version": self._previous, "tensors": self._tensors(self._previous).name}
        write_atomically(self.dirpath / "selected.json", json.dumps(entry, indent=2) + "\n")

    def _tensors(self, version: int) -> Path:
        assert self.dirpath is not None
        return self.dirpath / f"version-{version:06d}.safetensors"
