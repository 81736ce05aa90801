"""A recorded run as training data: the same batches, offline."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from typing_extensions import override

from lightning_mappa.algorithm.advantages import (
    ActionCredit,
    ActionRow,
    ActionStats,
    CreditSettings,
    credit,
)
from lightning_mappa.datamodules.rollout import RolloutDataModule
from lightning_mappa.errors import ConfigError, DataError
from lightning_mappa.rollout.transcripts import read_transcript, step_path
from lightning_mappa.runtime.base import AgentLink
from lightning_mappa.types import ActionKey, EpisodeStatus, Experience, MaskReason, StopReason


class TranscriptDataModule(RolloutDataModule):
    """Trains one agent of a finished run again on what was recorded; needs no engine, coach or other agent.

    There is nothing to validate and nobody to push weights to. Credit is formed anew from this agent's own
    KL and the other agents' as recorded.

    Args:
        path: a run folder, or its folder of transcripts.
        agent_id: whose actions to train on, those of all who act with its weights.
        credit: as in the recorded run, unless another is wanted.

    Raises:
        ConfigError: no transcripts there, or the agent took no action in the first step.
        DataError: a damaged line, with file and line number, or a missing step.
    """

    def __init__(self, path: str, agent_id: str, credit: CreditSettings | None = None) -> None:
        steps = RecordedSteps(path)
        agents = sorted({e.agent_id for e in steps[min(steps)].experiences})
        if agent_id not in agents:
            raise ConfigError(f"agent_id={agent_id!r} is not in {path}; recorded are {', '.join(agents) or 'none'}")
        # Not the whole of an AgentLink: what needs the rest of it finds that missing and refuses.
        super().__init__(cast(AgentLink, RecordedLink(steps, agent_id, credit or CreditSettings())))

    @override
    def val_dataloader(self) -> Any:
        return []


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStep:
    """One rollout step as its file has it, in episode order."""

    number: int
    experiences: tuple[Experience, ...]
    """Of every agent."""
    rows: tuple[ActionRow, ...]
    """As they went into credit, one per experience."""
    cut_episodes: frozenset[str]


class RecordedSteps(Mapping[int, RecordedStep]):
    """The steps of a run folder or a folder of transcripts, each read when it is asked for.

    Raises `ConfigError` where there are none, `DataError` where one is missing or damaged.
    """

    def __init__(self, path: str | Path) -> None:
        self._files = step_files(path)

    def __getitem__(self, step: int) -> RecordedStep:
        return read_step(self._files[step], step)

    def __iter__(self) -> Iterator[int]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


class RecordedLink:
    """What an `AgentLink` says of the experience of a run, said by `steps`, which follow one another."""

    def __init__(self, steps: Mapping[int, RecordedStep], agent_id: str, settings: CreditSettings) -> None:
        self.agent_id = agent_id
        self.first_step = min(steps)
        self.max_steps = max(steps) + 1
        self._steps = steps
        self._settings = settings
        self._step = steps[self.first_step]

    def experience(self, step: int) -> Sequence[Experience]:
        self._step = self._steps[step]
        return [e for e in self._step.experiences if e.agent_id == self.agent_id]

    def exchange(
        self, step: int, stats: Mapping[ActionKey, ActionStats], kl_coef: float
    ) -> Mapping[ActionKey, ActionCredit]:
        rows = [
            row if row.agent_id != self.agent_id else _own(row, stats.get(row.key), kl_coef) for row in self._step.rows
        ]
        return credit(rows, self._settings, cut_episodes=self._step.cut_episodes)

    def report(self, step: int, metrics: Mapping[str, float]) -> None:
        pass

    def checkpoint_path(self, version: int) -> None:
        return None

    def checkpoint_saved(self, version: int) -> None:
        pass

    def leave(self, error: BaseException | None = None) -> None:
        pass


def step_files(path: str | Path) -> dict[int, Path]:
    """Step → file, without a gap. Raises `ConfigError` for none, `DataError` for a gap."""
    folder = Path(path)
    if (folder / "transcripts").is_dir():
        folder = folder / "transcripts"
    numbers = sorted(
        int(file.stem.removeprefix("step-"))
        for file in folder.glob("step-*.jsonl")
        if file.stem.removeprefix("step-").isdigit()
    )
    if not numbers:
        raise ConfigError(f"path={str(path)!r}: holds no transcripts (step-000000.jsonl, …)")
    files = {number: step_path(folder, number) for number in range(numbers[0], numbers[-1] + 1)}
    if missing := sorted(set(files) - set(numbers)):
        raise DataError(f"{files[missing[0]]} is missing")
    return files


def read_steps(path: str | Path) -> Iterator[RecordedStep]:
    """Every step of a run folder or a folder of transcripts, in order."""
    for number, file in step_files(path).items():
        yield read_step(file, number)


def read_step(file: Path, number: int) -> RecordedStep:
    """Raises `DataError` with file and line number when a line is damaged or was never credited."""
    experiences, rows, cut = [], [], set()
    for line, record in enumerate(read_transcript(file), start=1):
        try:
            if record["episode"]["status"] == EpisodeStatus.FAILED:
                cut.add(record["episode_id"])
            if record["index"] >= 0:
                experiences.append(_experience(record))
                rows.append(_row(record))
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{file}, line {line}: {type(error).__name__} {error}") from error
    return RecordedStep(number=number, experiences=tuple(experiences), rows=tuple(rows), cut_episodes=frozenset(cut))


def _experience(record: Mapping[str, Any]) -> Experience:
    return Experience(
        key=(record["episode_id"], record["index"]),
        **_who(record),
        turn=record["turn"],
        prompt_ids=tuple(record["prompt_ids"]),
        response_ids=tuple(record["response_ids"]),
        rollout_log_probs=tuple(record["rollout_log_probs"]),
        score=record["verdict"]["score"],
        masked=_known_before_credit(record),
        truncated=record["stop_reason"] == StopReason.LENGTH,
        policy_version=record["policy_version"],
        temperature=record["temperature"],
    )


def _row(record: Mapping[str, Any]) -> ActionRow:
    if record["stats"] is None:
        raise ValueError("the action was never credited")
    return ActionRow(
        key=(record["episode_id"], record["index"]),
        **_who(record),
        turn=record["turn"],
        reward=record["reward"],
        masked=_known_before_credit(record),
        frozen=record["frozen"],
        kl_coef=record["kl_coef"],
        stats=ActionStats(**record["stats"]),
    )


def _who(record: Mapping[str, Any]) -> dict[str, str]:
    """Of a record that may be older than `weights`."""
    owner = record.get("weights")
    return {"agent_id": owner or record["agent_id"], "acted_as": record["agent_id"] if owner else ""}


def _known_before_credit(record: Mapping[str, Any]) -> MaskReason | None:
    masked = None if record["masked"] is None else MaskReason(record["masked"])
    return None if masked is MaskReason.RETURN_UNKNOWN else masked


def _own(row: ActionRow, stats: ActionStats | None, kl_coef: float) -> ActionRow:
    """The row with what the agent says now; an action that it left out is invalid, as in a live run."""
    row = dataclasses.replace(row, frozen=False, kl_coef=kl_coef, stats=stats or row.stats)
    if stats is None and row.masked in (None, MaskReason.TRUNCATED):
        return dataclasses.replace(row, masked=MaskReason.INVALID, reward=None)
    return row
