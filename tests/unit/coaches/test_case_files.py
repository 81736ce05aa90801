"""What a coach is shown of files, requirements and measured metrics."""

from __future__ import annotations

from typing import Any

from lightning_mappa.coaches.base import until
from lightning_mappa.coaches.prompt import CaseWriter
from lightning_mappa.tools.changes import FileChange, FileEvent
from lightning_mappa.types import Episode, Task, ToolResult, ToolStatus
from tests.unit.factories import make_action

STAGES = {
    "engineer": {"needs": ["train.csv"], "makes": ["X.pkl", "y.pkl"]},
    "analyst": {"needs": ["X.pkl", "y.pkl"], "makes": ["submission.csv"]},
}
TASK = Task(id="t", kind="k", prompt="?", metadata={"files": ["train.csv"]})


def episode_of(**fields) -> Episode:
    made = FileChange(path="X.pkl", event=FileEvent.CREATED, size=120)
    wrong = FileChange(path="submission.csv", event=FileEvent.CREATED, size=7)
    runs = [ToolResult(status=ToolStatus.OK, files=(made,)), ToolResult(status=ToolStatus.OK, files=(wrong,))]
    actions = (
        make_action(agent_id="engineer", role="Data Engineer", tool_results=(runs[0],)),
        make_action(agent_id="analyst", role="Analyst", index=1, tool_results=(runs[1],)),
    )
    known: dict[str, Any] = {"id": "e", "task": TASK, "actions": actions, "outcome": 1.0, "last_agent_id": "analyst"}
    return Episode(**known | fields)


def question(episode: Episode, index: int, *, batched: bool = False, **settings) -> str:
    writer = CaseWriter("Judge.", key=b"secret", stages=STAGES, batched=batched, **settings)
    case = writer.batch(episode, [0, 1], max_tokens=9) if batched else writer.case(episode, index, max_tokens=9)
    return case.request.question


def test_the_trail_and_what_was_not_met():
    first, second = (question(episode_of(), index) for index in (0, 1))
    assert "Files in the folder before" not in first
    assert "X.pkl: created, 120 bytes" in first
    assert "engineer was to find: train.csv; when it began, all are there." in first
    assert "engineer is to leave behind: X.pkl, y.pkl; after this step, y.pkl is not there." in first
    assert "X.pkl (120 bytes, written by Data Engineer in turn 1)\ntrain.csv (came with the task)" in second
    assert "analyst was to find: X.pkl, y.pkl; when it began, y.pkl is not there." in second
    assert "analyst is to leave behind: submission.csv; after this step, all are there." in second
    everything = question(episode_of(), 0, batched=True)
    assert "y.pkl is not there" in everything
    assert "submission.csv: created, 7 bytes" in everything


def test_metrics_and_the_reason_of_a_refusal_are_for_the_last_agent():
    measured = episode_of(metrics={"accuracy": 0.81234, "fair/accuracy": 0.81234})
    assert "accuracy" not in question(measured, 0)
    assert "Measured on what was handed in: accuracy 0.8123." in question(measured, 1)
    refused = episode_of(fault="missing_id", reason="3 of 9 ids are missing", outcome=0.0, metrics={"fair/f1": 0.0})
    assert "refused (missing_id)" in question(refused, 1)
    assert "3 of 9 ids are missing" in question(refused, 1)
    assert "Measured" not in question(refused, 1)
    assert "missing_id" not in question(refused, 0)


def test_a_step_judged_without_the_outcome_has_the_same_case_in_progress():
    episode = episode_of(metrics={"accuracy": 0.5})
    for index in (0, 1):
        assert question(until(episode, index), index, show_reference="none") == question(
            episode, index, show_reference="none"
        )
