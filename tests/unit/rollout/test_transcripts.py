"""Episodes written down and read back."""

from __future__ import annotations

import json

import pytest

from lightning_mappa.errors import DataError
from lightning_mappa.rollout.transcripts import read_episodes, write_transcript
from lightning_mappa.tools.changes import FileChange, FileEvent
from lightning_mappa.types import (
    ActionStatus,
    EpisodeStatus,
    ScoredEpisode,
    StopReason,
    Task,
    ToolCall,
    ToolResult,
    ToolStatus,
    Verdict,
)
from tests.unit.factories import make_action, make_scored

TASK = Task(id="t", kind="k", prompt="1 + 2?", reference="3", metadata={"files": {"a.csv": "coder"}})


@pytest.fixture
def episodes():
    ran = make_action(
        episode_id="e0",
        agent_id="executor",
        index=1,
        text="print(1) ✓",
        rollout_log_probs=(-0.1, -1.0 / 3.0),
        stop_reason=StopReason.LENGTH,
        tool_calls=(ToolCall(name="python", arguments={"code": "print(1)"}),),
        tool_results=(
            ToolResult(
                status=ToolStatus.NONZERO,
                stderr="no",
                exit_code=1,
                wall_s=0.25,
                tier="none",
                files=(FileChange(path="a.csv", event=FileEvent.CHANGED, size=3),),
            ),
        ),
        policy_version=3,
        temperature=0.7,
        seed=5,
    )
    first = make_scored(
        "e0",
        [make_action(episode_id="e0"), ran],
        [3.0, None],
        task=TASK,
        answer="3",
        sample=2,
        metrics={"rmse": 0.1},
        fault="missing_id",
    )
    capped = Verdict(score=4.0, reason="capped", coach="c", raw_score=9.0)
    idle = make_action(episode_id="e2", status=ActionStatus.NO_CODE)
    cut = make_scored("e2", [idle], [1.0], task=TASK, status=EpisodeStatus.FAILED, reason="deadline", outcome=None)
    return [
        first,
        make_scored("e1", [], [], task=TASK, status=EpisodeStatus.FAILED, reason="engine", outcome=None),
        ScoredEpisode(episode=cut.episode, verdicts=(capped,)),
    ]


def test_episodes_are_read_back_as_they_were(tmp_path, episodes):
    path = tmp_path / "step-000000.jsonl"
    write_transcript(path, episodes, step=0, split="train")
    assert read_episodes(path) == episodes


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"index": 2}, "line 2: ValueError action 2 follows 1 actions of its episode"),
        ({"status": "asleep"}, "line 2: ValueError 'asleep' is not a valid ActionStatus"),
        ({"task": {"id": "t"}}, "line 4: TypeError"),
    ],
)
def test_a_damaged_line_is_named(tmp_path, episodes, change, what):
    path = tmp_path / "step-000000.jsonl"
    write_transcript(path, episodes, step=0, split="train")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    number = 3 if "task" in change else 1
    lines[number] |= change
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(DataError, match=what):
        read_episodes(path)
