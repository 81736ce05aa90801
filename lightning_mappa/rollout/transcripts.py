"""Every action of a run as JSON lines, one file per rollout step, written whole or not at all."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lightning_mappa.algorithm.advantages import ActionCredit, ActionRow, action_advantage
from lightning_mappa.errors import DataError
from lightning_mappa.files import write_atomically
from lightning_mappa.tools.changes import FileChange, FileEvent
from lightning_mappa.types import (
    Action,
    ActionKey,
    ActionStatus,
    Episode,
    EpisodeStatus,
    ScoredEpisode,
    StopReason,
    Task,
    ToolCall,
    ToolResult,
    ToolStatus,
    Verdict,
)


def step_path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:06d}.jsonl"


def evaluation_path(folder: Path, split: str, version: int) -> Path:
    return folder / f"{split}-{version:06d}.jsonl"


def write_transcript(
    path: Path,
    episodes: Iterable[ScoredEpisode],
    *,
    step: int,
    split: str,
    rows: Iterable[ActionRow] = (),
    credits: Mapping[ActionKey, ActionCredit] | None = None,
) -> None:
    """Writes a line per action, and a line with `index` −1 for an episode that took none."""
    row_of = {row.key: row for row in rows}
    lines = []
    for scored in episodes:
        base = {"step": step, "split": split, **_episode_fields(scored.episode)}
        if not scored.episode.actions:
            lines.append({**base, "index": -1})
        for action, verdict in zip(scored.episode.actions, scored.verdicts, strict=True):
            key = (action.episode_id, action.index)
            row, given = row_of.get(key), (credits or {}).get(key)
            lines.append({**base, **_action_fields(action, verdict), **_credit_fields(row, given)})
    write_atomically(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))


def read_transcript(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of one file. Raises `DataError` with file and line number on a damaged one."""
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                record = json.loads(line)
            except ValueError as error:
                raise DataError(f"{path}, line {number}: not JSON ({error})") from error
            yield record


def read_episodes(path: Path) -> list[ScoredEpisode]:
    """The episodes of one file, in its order, with the verdicts as they were recorded.

    Raises `DataError` with file and line number when a line is damaged, or an action is not where its index says.
    """
    episodes: dict[str, tuple[Episode, list[Verdict]]] = {}
    for number, record in enumerate(read_transcript(path), start=1):
        try:
            episode, verdicts = episodes.setdefault(record["episode_id"], (_episode(record), []))
            if record["index"] < 0:
                continue
            if record["index"] != len(verdicts):
                raise ValueError(f"action {record['index']} follows {len(verdicts)} actions of its episode")
            verdicts.append(Verdict(**record["verdict"]))
            actions = (*episode.actions, _action(record))
            episodes[episode.id] = dataclasses.replace(episode, actions=actions), verdicts
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{path}, line {number}: {type(error).__name__} {error}") from error
    return [ScoredEpisode(episode=episode, verdicts=tuple(verdicts)) for episode, verdicts in episodes.values()]


def _episode(record: Mapping[str, Any]) -> Episode:
    ended = record["episode"]
    return Episode(
        id=record["episode_id"],
        task=Task(**record["task"]),
        actions=(),
        sample=record["sample"],
        **{**ended, "status": EpisodeStatus(ended["status"])},
    )


def _action(record: Mapping[str, Any]) -> Action:
    # A record may be older than `weights`.
    fields = {field.name: record[field.name] for field in dataclasses.fields(Action) if field.name != "weights"}
    fields["weights"] = record.get("weights")
    for name in ("prompt_ids", "response_ids", "rollout_log_probs"):
        fields[name] = tuple(fields[name])
    return Action(
        **{
            **fields,
            "status": ActionStatus(fields["status"]),
            "stop_reason": StopReason(fields["stop_reason"]),
            "tool_calls": tuple(ToolCall(**call) for call in fields["tool_calls"]),
            "tool_results": tuple(map(_tool_result, fields["tool_results"])),
        }
    )


def _tool_result(record: Mapping[str, Any]) -> ToolResult:
    """Of a record that may be older than `files`."""
    files = tuple(FileChange(**{**file, "event": FileEvent(file["event"])}) for file in record.get("files", ()))
    return ToolResult(**{**record, "status": ToolStatus(record["status"]), "files": files})


def _episode_fields(episode: Episode) -> dict[str, Any]:
    return {
        "episode_id": episode.id,
        "sample": episode.sample,
        "task": {**dataclasses.asdict(episode.task), "metadata": dict(episode.task.metadata)},
        "episode": {
            "status": episode.status,
            "reason": episode.reason,
            "answer": episode.answer,
            "outcome": episode.outcome,
            "metrics": dict(episode.metrics),
            "fault": episode.fault,
        },
    }


def _action_fields(action: Action, verdict: Verdict) -> dict[str, Any]:
    fields = dataclasses.asdict(action)
    return {**fields, "truncated": action.truncated, "verdict": dataclasses.asdict(verdict)}


def _credit_fields(row: ActionRow | None, given: ActionCredit | None) -> dict[str, Any]:
    """`advantage` is that of the action's first token; None where it was not trained on."""
    if row is None:
        return {
            "reward": None,
            "masked": None,
            "frozen": False,
            "kl_coef": 0.0,
            "stats": None,
            "advantage": None,
        }
    masked = row.masked if given is None else given.masked
    advantage = None
    if given is not None and masked is None:
        advantage = action_advantage(given, row.stats.kl_sum, row.kl_coef)
    return {
        "reward": row.reward,
        "masked": masked,
        "frozen": row.frozen,
        "kl_coef": row.kl_coef,
        "stats": dataclasses.asdict(row.stats),
        "advantage": advantage,
    }
