"""One audit case of a team on tables: who should have left which file, and who did not."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_mappa.audit.cases import AuditCase
from lightning_mappa.file_trail import described, file_trail, folder_after
from lightning_mappa.tools.changes import FileChange, FileEvent
from lightning_mappa.tools.code_blocks import code_blocks
from lightning_mappa.types import Action, ActionStatus, Episode, StopReason, Task, ToolCall, ToolResult, ToolStatus

ROLES = {"engineer": "Data Engineer", "modeler": "Modeler", "analyst": "Analyst"}
MAKES: Mapping[str, Sequence[str]] = {
    "engineer": ("X_train.pkl", "y_train.pkl", "X_test.pkl"),
    "modeler": ("model.pkl",),
    "analyst": ("submission.csv",),
}
"""As workflow=dsbench has it."""
GIVEN = ("sample_submission.csv", "test.csv", "train.csv")

BLAMED_BELOW = 3.0
"""A step that falls over what it was handed is worth 3 to 5 in the rubric for tables: that is no blame."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One generation call of one agent; with a `status` it ran a program."""

    agent_id: str
    text: str
    status: ToolStatus | None = None
    stdout: str = ""
    stderr: str = ""
    files: Mapping[str, int] | None = None
    """Path → bytes that the program left it with; -1 where it removed it."""
    no_code: bool = False
    faulty: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """What the verifier in code said of the hand-in."""

    metrics: Mapping[str, float]
    fault: str = ""
    reason: str = ""


def table_case(template: str, episode_id: str, task: Task, steps: Sequence[Step], ending: Ending) -> AuditCase:
    """The episode in which the agents took `steps`."""
    actions: list[Action] = []
    sizes: dict[str, int] = {}
    for step in steps:
        changes = [_change(path, size, sizes) for path, size in sorted((step.files or {}).items())]
        result = None
        if step.status is not None:
            result = ToolResult(
                status=step.status,
                stdout=step.stdout,
                stderr=step.stderr,
                exit_code={ToolStatus.OK: 0, ToolStatus.NONZERO: 1}.get(step.status),
                files=tuple(changes),
            )
        call = ToolCall(name="python", arguments={"code": "\n".join(code_blocks(step.text))})
        actions.append(
            Action(
                episode_id=episode_id,
                index=len(actions),
                agent_id=step.agent_id,
                role=ROLES[step.agent_id],
                turn=sum(action.agent_id == step.agent_id for action in actions),
                prompt_ids=(),
                response_ids=(),
                rollout_log_probs=(),
                prompt_text=_asked(task, actions, step.agent_id),
                text=step.text,
                status=ActionStatus.NO_CODE if step.no_code else ActionStatus.OK,
                stop_reason=StopReason.STOP,
                tool_calls=() if result is None else (call,),
                tool_results=() if result is None else (result,),
            )
        )
    episode = Episode(
        id=episode_id,
        task=task,
        actions=tuple(actions),
        answer=None if ending.fault else "submission.csv",
        outcome=0.0 if ending.fault else 1.0,
        metrics=ending.metrics,
        fault=ending.fault,
        reason=ending.reason,
    )
    faults = tuple(index for index, step in enumerate(steps) if step.faulty)
    return AuditCase(template=template, episode=episode, faults=faults, blamed_below=BLAMED_BELOW)


def table_task(rng: random.Random, digest: str) -> Task:
    """A task on an invented table; the id says nothing else."""
    what, target, kind = rng.choice(
        [
            ("flats that were offered for rent", "demand", "classification"),
            ("orders of a shop that sends parcels", "returned", "classification"),
            ("shifts of a machine in a workshop", "state", "classification"),
            ("fields of a farm in one season", "grade", "classification"),
        ]
    )
    rows = rng.randrange(200, 900)
    prompt = (
        f"Each row is one of {rows} {what}. Predict the column `{target}` for the rows of test.csv, and hand in "
        f"submission.csv with the columns id and {target}, as sample_submission.csv shows it. What counts is accuracy."
    )
    metadata = {"files": list(GIVEN), "id_column": "id", "targets": [target], "metric": "accuracy", "type": kind}
    return Task(id=f"audit-{digest}", kind=f"tables/{kind}", prompt=prompt, metadata=metadata)


def _change(path: str, size: int, sizes: dict[str, int]) -> FileChange:
    event = FileEvent.REMOVED if size < 0 else FileEvent.CHANGED if path in sizes else FileEvent.CREATED
    if path in GIVEN and size >= 0:
        event = FileEvent.CHANGED
    sizes[path] = size
    return FileChange(path=path, event=event, size=max(size, 0))


def _asked(task: Task, before: Sequence[Action], agent_id: str) -> str:
    if before and before[-1].agent_id == agent_id:
        last = before[-1].tool_results[-1]
        shown = "\n".join(part.strip() for part in (last.stdout, last.stderr) if part.strip()) or "(nothing)"
        return (
            f"Your program ended with status {last.status.value} and printed:\n{shown}\n\nGo on, or sum up your part."
        )
    folder = folder_after(GIVEN, file_trail(before))
    files = "\n".join(described(path, entry) for path, entry in folder.items())
    said = [f"{action.role} wrote:\n{action.text}" for action in before if not action.tool_results]
    makes = ", ".join(MAKES[agent_id])
    parts = [task.prompt, *said, f"Files in the folder:\n{files}"]
    return "\n\n".join([*parts, f"Write one python block for your part. It must leave behind: {makes}."])
