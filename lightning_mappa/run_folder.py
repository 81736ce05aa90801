"""The folder of one run: who may write it, what lies where, and which joint checkpoint can be trusted."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf

from lightning_mappa.errors import ConfigError, DataError, InfrastructureError
from lightning_mappa.files import publish, read_json, verify, write_atomically, write_json
from lightning_mappa.saved_config import saved_config

STATE = "run.json"


class RunFolder:
    """Paths and records of a run.

    config.yaml           the resolved config
    splits.json           the tasks of the splits train and selection, in order
    transcripts/          step-NNNNNN.jsonl, selection-NNNNNN.jsonl, report-initial.jsonl, report-selected.jsonl
    metrics.jsonl         a line per rollout step
    coach_calls.jsonl     a line when a call of a coach leaves, and one with what came of it
    coach_fence.key       what fences around agents' texts are made with
    recoach-<name>.json   what `mappa recoach` found; its coach's calls are in recoach-<name>/
    checkpoints/          step-NNNNNN/: a part per agent, run.json, manifest.json
    agents/<agent>/       what the agent's Trainer and loggers write; selected weights
    export/<agent>/       a Hugging Face folder or PEFT adapter, with tokenizer
    summary.json, test.json
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.transcripts = path / "transcripts"
        self.metrics = path / "metrics.jsonl"
        self.checkpoints = path / "checkpoints"
        self.summary = path / "summary.json"
        self.splits = path / "splits.json"

    def create(self, config: DictConfig) -> None:
        """Makes the folder, with the resolved config in it. Call it after every check of config and data."""
        path = self.path
        try:
            path.mkdir(parents=True, exist_ok=True)
            if any(path.iterdir()):
                raise ConfigError(
                    f"output_dir: {path} is not empty; name a new folder, or go on with it by resume={path}"
                )
        except OSError as error:
            raise ConfigError(f"output_dir: cannot write to {path} ({error.strerror})") from error
        self.write_config(config)

    def write_config(self, config: DictConfig) -> None:
        """What the run works with from now on, and so what the next resume starts from."""
        written = OmegaConf.merge(config, {"resume": None})
        write_atomically(self.path / "config.yaml", OmegaConf.to_yaml(written, resolve=True))

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        if not (path / "config.yaml").is_file():
            raise ConfigError(f"{path} is no run folder: it holds no config.yaml")
        return cls(path)

    def config(self) -> DictConfig:
        return saved_config(self.path / "config.yaml")

    def agent(self, agent_id: str) -> Path:
        return self.path / "agents" / agent_id

    def last_tensors(self, agent_id: str) -> Path:
        """The agent's trained tensors as its training ended."""
        return self.agent(agent_id) / "last.safetensors"

    def export(self, agent_id: str) -> Path:
        return self.path / "export" / agent_id

    @contextmanager
    def writing(self) -> Iterator[None]:
        """One writer at a time. A lock left by a process that is gone is taken over."""
        lock = self.path / ".lock"
        holder = _process_of(lock)
        if holder is not None:
            raise ConfigError(f"{self.path} is being written by process {holder}; wait for it or stop it")
        lock.write_text(json.dumps({"pid": os.getpid(), "started": _started(os.getpid())}))
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)

    def append_metrics(self, line: Mapping[str, Any]) -> None:
        """Adds a line; one that a crash has torn is dropped on resume."""
        try:
            with self.metrics.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
                file.flush()
        except OSError as error:
            raise InfrastructureError(f"cannot write {self.metrics}: {error.strerror}") from error

    def metric_lines(self) -> list[dict[str, Any]]:
        """The lines up to the first that is torn."""
        lines = []
        if self.metrics.exists():
            for line in self.metrics.read_text(encoding="utf-8").splitlines():
                try:
                    lines.append(json.loads(line))
                except ValueError:
                    break
        return lines

    # -- joint checkpoints ----------------------------------------------------------------------------------

    def checkpoint(self, version: int) -> Path:
        return self.checkpoints / f"step-{version:06d}"

    def begin_checkpoint(self) -> Path:
        """An empty hidden folder beside the checkpoints, so that the final rename stays on one file system."""
        temporary = self.checkpoints / f".tmp-{os.getpid()}"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        return temporary

    def publish_checkpoint(self, temporary: Path, version: int, state: Mapping[str, Any], keep: int) -> None:
        """Makes the folder visible as step `version`; older ones go only after it verifies."""
        write_json(temporary / STATE, {**state, "version": version})
        torch.save(_random_states(), temporary / "random.pt")
        final = self.checkpoint(version)
        publish(temporary, final)
        fault = verify(final)
        if fault is not None:
            raise InfrastructureError(f"checkpoint {final} does not read back: {fault}")
        for old in self._numbered()[keep:]:
            shutil.rmtree(old)

    @property
    def has_checkpoints(self) -> bool:
        """Whether there are any, complete or not."""
        return bool(self._numbered())

    def last_checkpoint(self) -> tuple[Path, list[str]]:
        """The newest checkpoint that verifies, and what was wrong with newer ones.

        Raises `DataError` when there is none.
        """
        passed_over: list[str] = []
        for folder in self._numbered():
            fault = verify(folder)
            if fault is None:
                return folder, passed_over
            passed_over.append(f"{folder.name}: {fault}")
        detail = f" ({'; '.join(passed_over)})" if passed_over else ""
        raise DataError(f"{self.path} holds no complete checkpoint to resume from{detail}")

    def rewind(self, version: int) -> None:
        """Drops what was recorded after `version`, which will be made again, and half-made checkpoints.

        Also newer ones that are damaged: counted as the newest, they would be kept in place of whole ones.
        """
        newer = [folder for folder in self._numbered() if folder > self.checkpoint(version)]
        for useless in (*self.checkpoints.glob(".tmp-*"), *newer):
            shutil.rmtree(useless)
        kept = [line for line in self.metric_lines() if line["step"] < version]
        write_atomically(self.metrics, "".join(json.dumps(line) + "\n" for line in kept))
        for kind, first_dropped in (("step", version), ("selection", version + 1)):
            for path in self.transcripts.glob(f"{kind}-*.jsonl"):
                if int(path.stem.removeprefix(f"{kind}-")) >= first_dropped:
                    path.unlink()

    def _numbered(self) -> list[Path]:
        return sorted(self.checkpoints.glob("step-*"), reverse=True)


def restore_random_states(checkpoint: Path) -> dict[str, Any]:
    """Puts the global generators back and returns run.json."""
    states = torch.load(checkpoint / "random.pt", weights_only=True)
    torch.set_rng_state(states["torch"])
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    return read_json(checkpoint / STATE)


def _random_states() -> dict[str, Any]:
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "python": [version, list(internal), gauss],
        "numpy": [name, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached],
    }


def _started(pid: int) -> str | None:
    """Start time of a process in clock ticks, so that a reused pid is not taken for the old process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19]
    except (OSError, IndexError):
        return None


def _process_of(lock: Path) -> int | None:
    try:
        record = json.loads(lock.read_text())
    except (OSError, ValueError):
        return None
    pid = int(record["pid"])
    return pid if pid != os.getpid() and _started(pid) is not None and _started(pid) == record["started"] else None
