"""The rules for teams that hand on files, row by row of their table, on episodes made by hand."""

from __future__ import annotations

import asyncio

import pytest

from lightning_mappa.coaches.caps import CappedCoach, GradedMetrics, table_caps
from lightning_mappa.coaches.table_rules import TableRulesCoach
from lightning_mappa.errors import ConfigError
from lightning_mappa.tools.changes import FileChange, FileEvent
from lightning_mappa.types import Action, ActionStatus, Episode, EpisodeStatus, Task, ToolResult, ToolStatus
from tests.unit.factories import make_action

STAGES = {
    "engineer": {"needs": ["train.csv"], "makes": ["X.pkl", "y.pkl"]},
    "modeler": {"needs": ["X.pkl", "y.pkl"], "makes": ["model.pkl"]},
    "analyst": {"needs": ["model.pkl"], "makes": ["submission.csv"]},
}
TASK = Task(id="t", kind="tables/regression", prompt="?", metadata={"files": ["train.csv", "test.csv"]})


def program(agent_id: str, *files: str, status: ToolStatus = ToolStatus.OK, gone: str = "") -> Action:
    """`x.pkl` was written with 9 bytes, `x.pkl:0` with none."""
    changes = []
    for name in files:
        path, _, size = name.partition(":")
        changes.append(FileChange(path=path, event=FileEvent.CREATED, size=int(size or 9)))
    if gone:
        changes.append(FileChange(path=gone, event=FileEvent.REMOVED, size=0))
    result = ToolResult(status=status, files=tuple(changes), exit_code=0)
    return make_action(agent_id=agent_id, tool_results=(result,))


def text(agent_id: str, status: ActionStatus = ActionStatus.OK) -> Action:
    return make_action(agent_id=agent_id, status=status)


def episode_of(*actions: Action, **fields) -> Episode:
    from dataclasses import replace

    numbered = tuple(replace(action, index=index) for index, action in enumerate(actions))
    return Episode(**{"id": "e", "task": TASK, "actions": numbered, "outcome": 1.0, **fields})


def scores(*actions: Action, coach=None, **fields) -> list[float | None]:
    coach = coach or TableRulesCoach(STAGES)
    episode = episode_of(*actions, **fields)
    return [asyncio.run(coach.score(episode, index)).score for index in range(len(actions))]


ENGINEER = program("engineer", "X.pkl", "y.pkl")
MODELER = program("modeler", "model.pkl")
ANALYST = program("analyst", "submission.csv")
FAILED = ToolStatus.NONZERO
LOST = {"outcome": 0.0, "fault": "missing", "reason": "no file"}


@pytest.mark.parametrize(
    ("actions", "expected"),
    [
        ([ENGINEER, text("engineer"), MODELER, ANALYST, program("analyst")], [9, 8, 9, 9, 8]),
        # More than one turn.
        ([program("engineer"), program("engineer", "X.pkl"), program("engineer", "y.pkl")], [6, 7, 9]),
        ([program("engineer", "X.pkl", status=FAILED), ENGINEER], [4, 9]),
        ([program("engineer", "X.pkl", "y.pkl", status=FAILED), text("engineer")], [5, 8]),
        # A file that should have been made is not there: after the last program, whatever text follows.
        ([program("engineer", "X.pkl"), text("engineer")], [1, 1]),
        ([program("engineer"), program("engineer", "X.pkl"), program("engineer")], [4, 5, 1]),
        ([program("engineer", status=FAILED), program("engineer", status=FAILED)], [3, 1]),
        ([program("engineer", "X.pkl", "y.pkl:0")], [1]),
        # Those after it are not to blame.
        ([program("engineer", "X.pkl"), program("modeler", status=FAILED), text("modeler")], [1, 4, 4]),
        ([program("engineer", "X.pkl"), program("modeler"), text("modeler")], [1, 4, 4]),
        ([program("engineer", "X.pkl"), program("modeler", "y.pkl", "model.pkl")], [1, 9]),
        # No code.
        ([text("engineer", ActionStatus.NO_CODE), text("modeler", ActionStatus.NO_CODE)], [0, 2]),
        # What others made is taken away, or emptied; and put back.
        ([ENGINEER, program("modeler", "model.pkl", gone="X.pkl"), text("modeler")], [9, 1, 1]),
        ([ENGINEER, program("modeler", "model.pkl", "X.pkl:0")], [9, 1]),
        ([ENGINEER, program("modeler", gone="test.csv")], [9, 1]),
        ([ENGINEER, program("modeler", gone="X.pkl"), program("modeler", "X.pkl", "model.pkl")], [9, 1, 9]),
        ([program("engineer", "X.pkl", "tmp"), program("engineer", "y.pkl", gone="tmp")], [7, 9]),
        # Nothing that could be judged.
        ([text("engineer", ActionStatus.PROMPT_TOO_LONG)], [None]),
        ([program("engineer", "X.pkl", "y.pkl", status=ToolStatus.SANDBOX_ERROR)], [None]),
        ([text("stranger")], [None]),
    ],
)
def test_the_table(actions, expected):
    assert scores(*actions) == expected


def test_a_refused_hand_in_is_on_whoever_wrote_it_last():
    refused = {"outcome": 0.0, "fault": "missing_id", "reason": "3 of 9 ids are missing"}
    team = [ENGINEER, MODELER, ANALYST, text("analyst")]
    assert scores(*team, **refused) == [9, 9, 1, 1]
    verdict = asyncio.run(TableRulesCoach(STAGES).score(episode_of(*team, **refused), 2))
    assert verdict.reason == "submission.csv is refused, missing_id: 3 of 9 ids are missing"
    # A modeler who wrote it and an analyst who only looked at it.
    early = [ENGINEER, program("modeler", "model.pkl", "submission.csv"), program("analyst")]
    assert scores(*early, **refused) == [9, 1, 8]
    assert scores(ENGINEER, program("modeler"), ANALYST, **refused) == [9, 1, 4]
    assert scores(ENGINEER, MODELER, program("analyst"), **LOST) == [9, 9, 1]


def test_an_agent_that_was_cut_might_have_made_its_files_yet():
    cut = {"status": EpisodeStatus.FAILED, "reason": "TimeoutError", "outcome": None}
    assert scores(ENGINEER, program("modeler"), **cut) == [9, None]
    assert scores(program("engineer", "X.pkl"), program("modeler"), **cut)[0] == 1
    assert scores(ENGINEER, program("modeler"), text("modeler"), **cut) == [9, None, None]


CUT = {"status": EpisodeStatus.FAILED, "reason": "TimeoutError", "outcome": None}


@pytest.mark.parametrize(
    ("actions", "expected"),
    [
        # Cut while it was at work: what it had not made yet, it might have made.
        ([program("engineer", status=FAILED)], [None]),
        ([program("engineer"), program("engineer", "X.pkl")], [None, None]),
        ([ENGINEER, program("modeler", status=FAILED), text("modeler")], [9, None, None]),
        ([program("engineer", "X.pkl"), program("modeler", status=FAILED)], [1, None]),
        # What it had made, it had made; and what it did wrong was wrong.
        ([program("engineer"), ENGINEER], [6, 9]),
        ([ENGINEER, program("modeler", "model.pkl"), text("modeler")], [9, 9, 8]),
        ([ENGINEER, program("modeler", gone="X.pkl")], [9, 1]),
        ([text("engineer", ActionStatus.NO_CODE)], [0]),
        # Those before it were done.
        ([program("engineer", "X.pkl"), text("engineer"), program("modeler")], [1, 1, None]),
    ],
)
def test_a_cut_episode_blames_nobody_for_what_was_still_to_come(actions, expected):
    assert scores(*actions, **CUT) == expected


BROKEN = ToolStatus.SANDBOX_ERROR


@pytest.mark.parametrize(
    ("actions", "expected"),
    [
        # The agent's own sandbox: before, at and after its failing, nothing that lacks is the agent's fault.
        ([program("engineer", status=BROKEN), text("engineer")], [None, None]),
        ([program("engineer", "X.pkl"), program("engineer", status=BROKEN)], [None, None]),
        ([program("engineer", status=FAILED), program("engineer", status=BROKEN)], [None, None]),
        ([program("engineer", status=BROKEN), program("engineer", status=FAILED), text("engineer")], [None] * 3),
        ([program("engineer", status=BROKEN), program("engineer", "X.pkl"), text("engineer")], [None] * 3),
        # It came to it all the same.
        ([program("engineer", "X.pkl"), program("engineer", status=BROKEN), ENGINEER], [7, None, 9]),
        ([program("engineer", status=BROKEN), ENGINEER, text("engineer")], [None, 9, 8]),
        # Those after it fell over what was not made, and so did those after them.
        (
            [program("engineer", status=BROKEN), program("modeler", status=FAILED), text("modeler")],
            [None, None, None],
        ),
        (
            [program("engineer", status=BROKEN), program("modeler"), program("analyst", status=FAILED)],
            [None, None, None],
        ),
        ([program("engineer", status=BROKEN), program("modeler", "y.pkl", "model.pkl"), ANALYST], [None, 9, 9]),
        # A sandbox that failed and was made up for is no excuse; nor is one for what had nothing to do with files.
        ([program("engineer", status=BROKEN), ENGINEER, program("modeler", status=FAILED)], [None, 9, 1]),
        ([program("engineer", status=BROKEN), text("modeler", ActionStatus.NO_CODE)], [None, 2]),
        ([program("engineer", status=BROKEN), program("modeler", gone="train.csv")], [None, 1]),
        # The engineer is at fault, and the modeler's sandbox failed once and was made up for.
        ([program("engineer", "X.pkl"), program("modeler", status=BROKEN), MODELER, text("modeler")], [1, None, 9, 8]),
    ],
)
def test_a_sandbox_that_failed_is_nobodys_fault(actions, expected):
    assert scores(*actions) == expected


def test_reasons_name_the_sandbox_that_failed():
    episode = episode_of(program("engineer", status=BROKEN), program("modeler", status=FAILED))
    verdict = asyncio.run(TableRulesCoach(STAGES).score(episode, 1))
    assert verdict.reason == "model.pkl is missing, but the sandbox of a program of engineer failed"
    own = asyncio.run(
        TableRulesCoach(STAGES).score(episode_of(program("engineer", status=BROKEN), text("engineer")), 1)
    )
    assert own.reason == "X.pkl, y.pkl are missing, but the sandbox of a program of its part failed"


def test_a_refused_hand_in_that_a_sandbox_kept_from_being_mended_is_no_fault():
    refused = {"outcome": 0.0, "fault": "missing_id", "reason": "3 of 9 ids are missing"}
    assert scores(ENGINEER, MODELER, ANALYST, program("analyst", status=BROKEN), **refused) == [9, 9, None, None]
    assert scores(ENGINEER, MODELER, program("analyst", status=BROKEN), ANALYST, **refused) == [9, 9, None, 1]
    assert scores(ENGINEER, program("modeler", status=BROKEN), ANALYST, **refused) == [9, None, None]


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        ({"accuracy": 0.9}, [9, 9, 9]),
        ({"accuracy": 0.7, "roc_auc": 0.8}, [9, 9, 8]),
        ({"accuracy": 0.7}, [9, 9, 6]),
        ({"accuracy": 0.6}, [9, 9, 4]),
        ({"accuracy": 0.5, "roc_auc": 0.52}, [6, 5, 3]),
        ({"rmse_percent": 9.0}, [9, 9, 9]),
        ({"rmse_percent": 25.0}, [9, 9, 8]),
        ({"rmse_percent": 50.0}, [9, 9, 6]),
        ({"rmse_percent": 50.1}, [6, 5, 4]),
        ({"fair/accuracy": 0.5}, [9, 9, 9]),
        ({}, [9, 9, 9]),
    ],
)
def test_measured_metrics_hold_scores_down(metrics, expected):
    coach = CappedCoach(TableRulesCoach(STAGES), table_caps(), metrics=GradedMetrics())
    assert scores(ENGINEER, MODELER, ANALYST, coach=coach, metrics=metrics) == expected


@pytest.mark.parametrize(
    ("stages", "match"),
    [
        ({}, "coach.stages is empty"),
        ({"a": {"make": []}}, "coach.stages.a.make: allowed are needs and makes"),
        ({"a": {"makes": "x.csv"}}, r"coach.stages.a.makes=x.csv: must be a list of files"),
    ],
)
def test_wrong_stages_are_named(stages, match):
    with pytest.raises(ConfigError, match=match):
        TableRulesCoach(stages)
