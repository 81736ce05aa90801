"""A relay of files: what each agent is told of the folder, by the harness and not by the agent before it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from lightning_mappa.errors import ConfigError
from lightning_mappa.file_trail import TrailEntry, described, file_trail, folder_after, missing
from lightning_mappa.tools.changes import FileChange, FileEvent
from lightning_mappa.types import Task, ToolResult, ToolStatus
from lightning_mappa.workflows.base import Message, last_agent_id
from lightning_mappa.workflows.file_relay import FileRelay
from tests.unit.factories import make_action
from tests.unit.workflows.table import Sums, Table, spec, tools

STAGES = {
    "engineer": {"needs": ["train.csv"], "makes": ["X.pkl", "y.pkl"]},
    "modeler": {"needs": ["X.pkl", "y.pkl"], "makes": ["model.pkl"]},
    "analyst": {"needs": ["model.pkl"]},
}
TASK = Task(id="t", kind="k", prompt="?", metadata={"files": ["train.csv"]})


def entry(path: str, event: FileEvent = FileEvent.CREATED, size: int = 9, agent: str = "engineer") -> TrailEntry:
    return TrailEntry(path=path, event=event, size=size, agent_id=agent, role=agent.title(), turn=0, step=0)


@dataclass
class Scripted:
    """A seat that hands on the files it was made with, and keeps what it was told."""

    agent_id: str
    files: Sequence[TrailEntry] = ()
    told: dict[str, Any] = field(default_factory=dict)
    role: str = "Role"

    async def act(self, task, seen, **extra):
        self.told = {"seen": [message.agent_id for message in seen], **extra}
        return Message(agent_id=self.agent_id, role=self.role, text=f"by {self.agent_id}", files=tuple(self.files))


def play(visibility: str = "full", **files: Sequence[TrailEntry]) -> dict[str, Scripted]:
    relay = FileRelay(STAGES, visibility)
    seats = {agent: Scripted(agent, files.get(agent, ())) for agent in relay.agent_ids}
    assert asyncio.run(relay.run(TASK, seats)) == "by analyst"
    return seats


def test_each_is_told_what_lies_there_what_is_missing_and_what_to_make():
    seats = play(
        engineer=[entry("X.pkl", size=120), entry("y.pkl"), entry("tmp")],
        modeler=[entry("tmp", FileEvent.REMOVED, 0), entry("y.pkl", FileEvent.CHANGED, 11, "modeler")],
    )
    assert seats["engineer"].told == {
        "seen": [],
        "files": ["train.csv (came with the task)"],
        "missing": [],
        "makes": ["X.pkl", "y.pkl"],
    }
    assert seats["modeler"].told["files"] == [
        "train.csv (came with the task)",
        "X.pkl (120 bytes, written by Engineer in turn 1)",
        "y.pkl (9 bytes, written by Engineer in turn 1)",
        "tmp (9 bytes, written by Engineer in turn 1)",
    ]
    assert seats["analyst"].told == {
        "seen": ["engineer", "modeler"],
        "files": [
            "train.csv (came with the task)",
            "X.pkl (120 bytes, written by Engineer in turn 1)",
            "y.pkl (11 bytes, written by Modeler in turn 1)",
        ],
        "missing": ["model.pkl"],
        "makes": [],
    }


def test_an_empty_file_is_a_missing_one_and_partial_sight_is_of_the_last_alone():
    seats = play("partial", engineer=[entry("X.pkl", size=0), entry("y.pkl")])
    assert seats["modeler"].told["missing"] == ["X.pkl"]
    assert seats["analyst"].told["seen"] == ["modeler"]


def test_what_an_agent_is_shown_is_bounded_and_begins_with_what_counts():
    seats = play(engineer=[entry("X.pkl"), entry("y.pkl"), *(entry(f"a{number:03d}") for number in range(500))])
    files = seats["modeler"].told["files"]
    assert len(files) == 41
    assert [line.partition(" ")[0] for line in files[:4]] == ["train.csv", "X.pkl", "y.pkl", "a000"]
    assert files[-1] == "and 463 more files"


def test_it_knows_its_agents_and_its_end():
    relay = FileRelay(STAGES)
    assert list(relay.agent_ids) == ["engineer", "modeler", "analyst"]
    assert last_agent_id(relay) == "analyst"


@pytest.mark.parametrize(
    ("stages", "visibility", "match"),
    [
        ({}, "full", "workflow.stages is empty"),
        ({"a": {"wants": []}}, "full", "workflow.stages.a.wants: allowed are needs and makes"),
        ({"a": {"needs": [1]}}, "full", r"workflow.stages.a.needs=\[1\]: must be a list of files"),
        (STAGES, "none", "workflow.visibility=none: allowed are full, partial"),
    ],
)
def test_wrong_settings_are_named(stages, visibility, match):
    with pytest.raises(ConfigError, match=match):
        FileRelay(stages, visibility)


def test_the_trail_says_who_when_and_how_large():
    made, gone = (
        FileChange(path="a", event=FileEvent.CREATED, size=3),
        FileChange(path="b", event=FileEvent.REMOVED, size=0),
    )
    runs = (ToolResult(status=ToolStatus.OK, files=(made,)), ToolResult(status=ToolStatus.NONZERO, files=(gone,)))
    actions = [
        make_action(agent_id="x", role="X"),
        make_action(agent_id="x", role="X", index=1, turn=1, tool_results=runs),
    ]
    trail = file_trail(actions)
    assert [(e.path, e.event, e.size, e.role, e.turn, e.step) for e in trail] == [
        ("a", FileEvent.CREATED, 3, "X", 1, 1),
        ("b", FileEvent.REMOVED, 0, "X", 1, 1),
    ]
    folder = folder_after(["b", "c"], trail)
    assert folder == {"a": trail[0], "c": None}
    assert missing(["a", "b", "c"], folder) == ["b"]
    assert [described(path, found) for path, found in folder.items()] == [
        "a (3 bytes, written by X in turn 2)",
        "c (came with the task)",
    ]


def test_a_seat_hands_on_the_files_of_all_its_turns_of_one_act():
    first, second = (FileChange(path=name, event=FileEvent.CREATED, size=1) for name in "ab")
    results = [ToolResult(status=ToolStatus.OK, files=(change,)) for change in (first, second)]
    table = Table({"solver": ["sum(1+2)", "sum(3+4)", "done", "again"]})
    seat = table.seat(spec(tools=tools(Sums(results)), max_turns=3))
    message = asyncio.run(seat.act(TASK, ()))
    assert [(e.path, e.turn, e.step) for e in message.files] == [("a", 0, 0), ("b", 1, 1)]
    assert asyncio.run(seat.act(TASK, ())).files == ()
    assert seat.workspace == Path("/workspace")
