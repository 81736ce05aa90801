"""Finished runs as they are compared: a config without what names a run, and outcomes by problem."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from omegaconf import DictConfig, ListConfig, OmegaConf

from lightning_mappa.errors import ConfigError
from lightning_mappa.files import read_json
from lightning_mappa.report import TEST
from lightning_mappa.rollout.transcripts import evaluation_path, read_transcript
from lightning_mappa.run_folder import RunFolder

NO_PART_OF_A_CONDITION = frozenset(
    {
        *("seed", "output_dir", "run", "resume", "inputs", "optimized_metric", "n_cases", "held_out"),
        *("plan", "export", "recoach", "hydra", "logger"),
        *("trainer.enable_progress_bar", "runtime.num_threads", "datamodule.report_limit"),
    }
)
"""Keys, with all below them, that say how or where a run was made and not what it is. A key `seed` is left out
wherever it stands."""

SplitRead = Literal["report", "selection"]
Outcomes = Mapping[str, Sequence[float]]
"""Problem → outcomes of its graded samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    folder: Path
    seed: int
    condition: Mapping[str, Any]
    """Dotted key → value, of everything that makes it this experiment and no other."""
    split: SplitRead
    initial: Outcomes
    selected: Outcomes


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """Each path that is a run folder, and of each other folder the run folders right in it, by name.

    Raises `ConfigError` for a path that is neither.
    """
    found: list[Path] = []
    for path in paths:
        if (path / "config.yaml").is_file():
            found.append(path)
            continue
        inside = sorted(child.parent for child in path.glob("*/config.yaml"))
        if not inside:
            raise ConfigError(f"{path} is no run folder, and there is none right in it")
        found += sorted(inside, key=_natural)
    return list(dict.fromkeys(found))


def load_runs(folders: Sequence[Path]) -> list[RunResult]:
    """All on the report split where every run has read it, else all on the selection split.

    Raises `ConfigError` for a run without the figures.
    """
    split: SplitRead = "report" if all((folder / TEST).exists() for folder in folders) else "selection"
    return [_load(folder, split) for folder in folders]


def flat_condition(config: DictConfig) -> dict[str, Any]:
    """Paths in the run's own folder are the same in every run."""
    own = config.get("output_dir")
    leaves = dict(_leaves(OmegaConf.to_container(config, resolve=True), ""))
    if not own:
        return leaves
    return {
        key: value.replace(own, "<run folder>", 1) if isinstance(value, str) and value.startswith(own) else value
        for key, value in leaves.items()
    }


def _leaves(node: Any, key: str) -> Iterator[tuple[str, Any]]:
    if key in NO_PART_OF_A_CONDITION or key.rpartition(".")[2] == "seed":
        return
    if isinstance(node, dict) and node:
        for name, inner in node.items():
            yield from _leaves(inner, f"{key}.{name}" if key else str(name))
    else:
        yield key, tuple(map(str, node)) if isinstance(node, (list, ListConfig)) else node


def _load(path: Path, split: SplitRead) -> RunResult:
    folder = RunFolder.open(path)
    config = folder.config()
    summary = read_json(folder.summary) if folder.summary.exists() else {"status": "under way"}
    if summary["status"] != "done":
        raise ConfigError(f"{path} is not finished ({summary['status']}): finish it by resume={path}, or leave it out")
    if split == "report":
        initial, selected = (folder.transcripts / f"report-{name}.jsonl" for name in ("initial", "selected"))
    else:
        version = read_json(folder.summary).get("selected_version") if folder.summary.exists() else None
        if version is None:
            raise ConfigError(
                f"{path} has selected no weights: is it finished? And was it run with CheckpointSelection?"
            )
        initial, selected = (evaluation_path(folder.transcripts, "selection", v) for v in (0, version))
    for transcript in (initial, selected):
        if not transcript.exists():
            raise ConfigError(f"{path} has no {transcript.name}, which its outcomes by problem are in")
    return RunResult(
        folder=path,
        seed=int(config.seed),
        condition=flat_condition(config),
        split=split,
        initial=_outcomes(initial),
        selected=_outcomes(selected),
    )


def _outcomes(transcript: Path) -> dict[str, list[float]]:
    """By problem; every episode once, however many actions it has."""
    of_episode: dict[str, tuple[str, float | None]] = {}
    for line in read_transcript(transcript):
        of_episode[line["episode_id"]] = line["task"]["id"], line["episode"]["outcome"]
    outcomes: dict[str, list[float]] = {}
    for _, (task, outcome) in sorted(of_episode.items()):
        samples = outcomes.setdefault(task, [])
        if outcome is not None:
            samples.append(outcome)
    return outcomes


def _natural(path: Path) -> tuple[int, str]:
    """The jobs of a sweep by number."""
    return (int(path.name), "") if path.name.isdigit() else (1 << 62, path.name)
