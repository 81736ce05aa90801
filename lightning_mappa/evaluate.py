"""`mappa validate`, `test` and `predict`: what a trained system can do, with the weights of its run folder."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from safetensors.torch import load_file

from lightning_mappa.errors import ConfigError
from lightning_mappa.export import joint_selection
from lightning_mappa.files import write_json
from lightning_mappa.record import evaluation_metrics
from lightning_mappa.report import (
    TEST,
    peak_and_selected,
    reading,
    refuse_second_reading,
    refuse_shared_problems,
    report_figures,
    report_text,
)
from lightning_mappa.rollout.coordinator import RolloutCoordinator
from lightning_mappa.rollout.engine import Engine
from lightning_mappa.rollout.plan import RolloutPlan
from lightning_mappa.rollout.transcripts import write_transcript
from lightning_mappa.run_folder import RunFolder
from lightning_mappa.runtime.place import place_for
from lightning_mappa.system import (
    Environment,
    build_coordinator,
    build_environment,
    quiet_libraries,
    seed_everything,
)
from lightning_mappa.types import Episode, ScoredEpisode, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedSystem:
    """A run's agents, served with their weights of version 0 until `select` is called."""

    cfg: DictConfig
    folder: RunFolder
    environment: Environment
    engine: Engine
    coordinator: RolloutCoordinator
    trained: Sequence[str]

    @classmethod
    @contextmanager
    def loaded(cls, cfg: DictConfig) -> Iterator[TrainedSystem]:
        """`cfg` is the config of the run that `cfg.run` names.

        Its weights are those in the run's folder: there is no rank that could send them from a GPU.
        """
        cfg = OmegaConf.merge(cfg, {"engine": {"weight_transport": "object_store"}})  # type: ignore[assignment]
        folder = RunFolder.open(Path(cfg.run))
        quiet_libraries()
        seed_everything(cfg)
        with closing(build_environment(cfg)) as environment, closing(place_for(cfg)) as place:
            yield cls(
                cfg=cfg,
                folder=folder,
                environment=environment,
                engine=place.engine,
                coordinator=build_coordinator(cfg, environment, place.facts, place.engine),
                trained=[agent_id for agent_id, facts in place.facts.items() if facts.trained],
            )

    def select(self) -> int:
        """Serves the best joint version and says which it is."""
        selection = joint_selection(self.folder, self.trained)
        if selection is None:
            raise ConfigError(f"{self.folder.path} holds no selected weights; was it run with CheckpointSelection?")
        for agent_id, path in selection.tensors.items():
            self.engine.update_weights(agent_id, selection.version, load_file(path))
        return selection.version

    def play(self, tasks: Sequence[Task], split: str, version: int = 0) -> tuple[ScoredEpisode, ...]:
        """Episodes at the evaluation temperature, not scored by the coach; the same seeds at every version."""
        plan = RolloutPlan(
            split=split,
            step=version,
            tasks=tasks,
            n_samples=self.cfg.datamodule.val_n_samples,
            temperature=self.cfg.datamodule.val_temperature,
            scored=False,
        )
        return asyncio.run(self.coordinator.collect(plan)).episodes


def validate(cfg: DictConfig) -> dict[str, Any]:
    """The selected weights on the selection split, as `fit` measured them."""
    with TrainedSystem.loaded(cfg) as system:
        version = system.select()
        tasks = system.environment.source.tasks("selection")[: cfg.datamodule.val_limit]
        metrics = evaluation_metrics(system.play(tasks, "selection", version))
    Console().print_json(data={"version": version, **metrics})
    return {"val": metrics, "version": version}


def test(cfg: DictConfig) -> dict[str, Any]:
    """Reads the report split, once per run: initial and selected weights on the same problems and seeds.

    Writes test.json: see `report.report_figures`, and beside them the peak and the selected version on the
    selection split. Every reading, complete or not, leaves a line in report_readings.jsonl.

    Raises `ConfigError` where the split has been read before, or shares a problem with the selection split.
    """
    folder = RunFolder.open(Path(cfg.run))
    refuse_second_reading(folder)
    with TrainedSystem.loaded(cfg) as system, system.folder.writing():
        refuse_shared_problems(system.environment.source)
        with reading(folder, limit=cfg.datamodule.report_limit):
            result = _report(system)
            write_json(folder.path / TEST, result)
    print(f"{report_text(result)}\n{folder.path / TEST}")
    return result


def _report(system: TrainedSystem) -> dict[str, Any]:
    data = system.cfg.datamodule
    tasks = system.environment.source.tasks("report")[: data.report_limit]
    initial = system.play(tasks, "report")
    version = system.select()
    selected = system.play(tasks, "report", version)
    for name, episodes, step in (("initial", initial, 0), ("selected", selected, version)):
        transcript = system.folder.transcripts / f"report-{name}.jsonl"
        write_transcript(transcript, episodes, step=step, split="report")
    return {
        **report_figures(initial, selected, k=data.val_n_samples, seed=system.cfg.seed),
        "selected_version": version,
        "selection": peak_and_selected(system.folder, version),
        "seed": system.cfg.seed,
        "samples_per_problem": data.val_n_samples,
        "temperature": data.val_temperature,
        "initial_by_kind": evaluation_metrics(initial),
        "selected_by_kind": evaluation_metrics(selected),
    }


def predict(cfg: DictConfig) -> dict[str, Any]:
    """The trained system answers `cfg.inputs`: a task's text, or a file with one per line or in JSON."""
    tasks = read_inputs(str(cfg.inputs))
    console = Console(soft_wrap=True, highlight=False)
    answers = []
    with TrainedSystem.loaded(cfg) as system:
        system.select()
        for scored in system.play(tasks, "predict"):
            _show(console, scored.episode)
            answers.append({"task": scored.episode.task.prompt, "answer": scored.episode.answer})
    return {"answers": answers}


def read_inputs(inputs: str) -> list[Task]:
    """Tasks without a reference. A file may be JSON, JSON lines with `prompt`, or plain text, a task per line."""
    path = Path(inputs)
    is_file = len(inputs) < 4096 and path.is_file()
    texts = _prompts(path) if is_file else [inputs]
    if not texts or not all(text.strip() for text in texts):
        raise ConfigError(f"inputs={inputs!r}: no task text in it")
    return [Task(id=f"input-{i}", kind="input", prompt=text.strip()) for i, text in enumerate(texts)]


def _prompts(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8")
    if path.suffix not in (".json", ".jsonl"):
        return [line for line in text.splitlines() if line.strip()]
    try:
        whole = text.lstrip().startswith("[")
        rows = json.loads(text) if whole else [json.loads(line) for line in text.splitlines() if line.strip()]
        return [str(row["prompt"]) for row in rows]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"inputs={path}: JSON tasks need a `prompt` each ({error})") from error


def _show(console: Console, episode: Episode) -> None:
    console.print(f"\n{episode.task.prompt}", style="bold", markup=False)
    for action in episode.actions:
        console.print(f"  {action.role}, turn {action.turn + 1}:", style="cyan")
        console.print("    " + action.text.replace("\n", "\n    "), markup=False)
        for result in action.tool_results:
            output = (result.stdout or result.stderr or result.reason).strip()
            console.print(f"    → {result.status}: {output}", style="dim", markup=False)
    if episode.reason:
        console.print(f"  failed: {episode.reason}", style="red", markup=False)
    console.print(f"  answer: {episode.answer if episode.answer is not None else 'none'}", markup=False)
