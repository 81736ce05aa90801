"""Faults that recur, as the harness counts them, told to the coach."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest

from lightning_mappa.coaches.base import coach_state, end_batch, load_coach_state
from lightning_mappa.coaches.faults import MAX_TOLD, FaultMemory, faults_of
from lightning_mappa.errors import ConfigError
from lightning_mappa.types import ActionStatus, Episode, EpisodeStatus, StopReason, Task, ToolResult, ToolStatus
from tests.fake_messages_api import message, verdict
from tests.unit.coaches.conftest import make_episode
from tests.unit.factories import make_action


def ran(stderr="", status=ToolStatus.NONZERO):
    return ToolResult(status=status, stderr=stderr)


NAME_ERROR = ran("Traceback (most recent call last):\n  File \"main.py\"\nNameError: name 'totl' is not defined\n")
NO_FILE = ran("FileNotFoundError: [Errno 2] No such file or directory: 'x.csv'\n")


def episode_of(*actions, answer="3", status=EpisodeStatus.OK, episode_id="e"):
    steps = tuple(replace(action, index=index) for index, action in enumerate(actions))
    return Episode(id=episode_id, task=Task(id="t", kind="k", prompt="?"), actions=steps, answer=answer, status=status)


@pytest.mark.parametrize(
    ("fields", "faults"),
    [
        ({}, []),
        ({"tool_results": (NAME_ERROR,)}, ["a program ended with NameError"]),
        (
            {"tool_results": (NAME_ERROR, NAME_ERROR, NO_FILE)},
            ["a program ended with NameError", "a program did not find a file"],
        ),
        ({"tool_results": (ran("pandas.errors.ParserError: bad"),)}, ["a program ended with ParserError"]),
        ({"tool_results": (ran("exit"),)}, ["a program ended with an error"]),
        ({"tool_results": (ran(status=ToolStatus.TIMEOUT),)}, ["a program ran out of time"]),
        ({"tool_results": (ran(status=ToolStatus.SANDBOX_ERROR),)}, []),
        ({"tool_results": (ran(status=ToolStatus.OK),)}, []),
        ({"stop_reason": StopReason.LENGTH}, ["its text was cut at the token limit"]),
        ({"status": ActionStatus.NO_CODE}, ["it has a tool and wrote no program"]),
        ({"status": ActionStatus.PROMPT_TOO_LONG}, ["its prompt did not fit the context"]),
        ({"text": "I failed: NameError, no file, cut"}, []),
    ],
)
def test_faults_are_what_the_harness_has_seen(fields, faults):
    assert list(faults_of(episode_of(make_action(**fields), make_action()), 0)) == faults


def test_an_answer_that_cannot_be_read_is_the_last_ones_fault():
    lost = "it gave no answer that can be read"
    two = (make_action(), make_action())
    assert [list(faults_of(episode_of(*two, answer=None), index)) for index in (0, 1)] == [[], [lost]]
    assert list(faults_of(episode_of(*two, answer=None, status=EpisodeStatus.FAILED), 1)) == []
    assert list(faults_of(episode_of(*two, answer=None, status=EpisodeStatus.RUNNING), 1)) == []


def test_every_way_a_program_ends_has_a_name():
    for status in ToolStatus:
        named = list(faults_of(episode_of(make_action(tool_results=(ran(status=status),)), make_action()), 0))
        assert len(named) == (status not in (ToolStatus.OK, ToolStatus.SANDBOX_ERROR))


def fed(memory, faulty, clean, batch=0):
    for number in range(faulty + clean):
        results = (NAME_ERROR,) if number < faulty else ()
        memory.see(episode_of(make_action(role="coder", tool_results=results), episode_id=f"{batch}-{number}"), 0)
    memory.end_of_batch()


def test_only_what_recurs_is_told_with_its_share_and_per_role():
    memory = FaultMemory(3)
    fed(memory, 1, 3)
    assert memory.told("coder") == ""
    fed(memory, 4, 0, batch=1)
    # 0.9 · 1 + 4 of 0.9 · 4 + 4
    assert memory.told("coder") == f"coder, {4.9 / 7.6:.0%} of its steps: a program ended with NameError"
    assert memory.told("solver") == ""


def test_a_batch_is_taken_in_at_its_end_and_each_action_once():
    memory = FaultMemory(3)
    episode = episode_of(make_action(role="coder", tool_results=(NAME_ERROR,)))
    for _ in range(5):
        memory.see(episode, 0)
    assert memory.told("coder") == ""
    memory.end_of_batch()
    assert memory.told("coder") == ""  # one action, below what recurs


def test_old_faults_fade():
    memory = FaultMemory(3)
    fed(memory, 4, 0)
    assert memory.told("coder")
    for batch in range(1, 8):
        fed(memory, 0, 4, batch)
    assert memory.told("coder") == ""


def test_what_is_told_is_bounded():
    memory = FaultMemory(MAX_TOLD)
    for number in range(60):
        kind = f"{'X' * 30}{number % 12:02d}Error"
        action = make_action(role="coder", tool_results=(ran(f"{kind}: {'long ' * 500}"),))
        memory.see(episode_of(action, episode_id=str(number)), 0)
    memory.end_of_batch()
    lines = memory.told("coder").splitlines()
    assert len(lines) == MAX_TOLD
    assert all(len(line) < 120 and "long" not in line for line in lines)


@pytest.mark.parametrize("told", [-1, MAX_TOLD + 1])
def test_a_wrong_number_is_refused(told):
    with pytest.raises(ConfigError, match=rf"coach.recall_faults is {told}; allowed: 0 to {MAX_TOLD}"):
        FaultMemory(told)


def test_the_coach_is_told_within_a_fence_and_a_resumed_one_the_same(serve):
    def good(call):
        return message(verdict(call, 7))

    def question(service):
        return service.api.calls[-1].body["messages"][0]["content"][1]["text"]

    service = serve(good, recall_faults=2)
    for number in range(4):
        service.score(make_episode(episode_id=f"e{number}", tool_results=(NAME_ERROR,)))
        assert "What code has counted" not in question(service)
    end_batch(service.coach)
    service.score(make_episode(episode_id="next"))
    told = question(service)
    fence = told.index("What code has counted")
    assert (
        fence < told.index("solver, 100% of its steps: a program ended with NameError\n") < told.index("Judge step 1")
    )
    state = json.loads(json.dumps(coach_state(service.coach)))
    resumed = serve(good, recall_faults=2)
    resumed.coach._writer.key = service.coach._writer.key  # as from the folder of one run
    load_coach_state(resumed.coach, state)
    resumed.score(make_episode(episode_id="next"))
    assert question(resumed) == told


def test_a_coach_that_recalls_nothing_has_no_state_and_the_same_cases(serve):
    service = serve(lambda call: message(verdict(call, 7)))
    for number in range(4):
        service.score(make_episode(episode_id=f"e{number}", tool_results=(NAME_ERROR,)))
    end_batch(service.coach)
    assert coach_state(service.coach) == {}
    asyncio.run(service.coach.score(make_episode(), 0))
    assert "What code has counted" not in service.api.calls[-1].body["messages"][0]["content"][1]["text"]
