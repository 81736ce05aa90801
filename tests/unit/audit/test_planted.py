"""Planted episodes are what a rollout would have left, and say truly who went wrong."""

from __future__ import annotations

import contextlib
import io
from collections import Counter
from dataclasses import replace

import pytest

from lightning_mappa.audit.cases import PADDING_WORDS, AuditCase, filler
from lightning_mappa.audit.planted import HELD_OUT, OPEN, make_cases
from lightning_mappa.coaches.rules import output_value
from lightning_mappa.tasks.arithmetic import Problem
from lightning_mappa.tools.code_blocks import code_blocks
from lightning_mappa.types import ActionStatus, ToolStatus

CASES = [case for held_out in (False, True) for case in make_cases(3, 280, held_out=held_out)]


def of(template: str) -> list[AuditCase]:
    found = [case for case in CASES if case.template == template]
    assert len(found) >= 20
    return found


def test_the_same_seed_gives_the_same_cases_and_another_seed_others():
    assert make_cases(3, 280) == CASES[:280]
    assert make_cases(4, 280) != CASES[:280]


def test_every_template_takes_its_turn_and_none_is_both_open_and_held_out():
    assert not set(OPEN) & set(HELD_OUT)
    counts = Counter(case.template for case in CASES)
    assert set(counts) == {template.__name__ for template in (*OPEN, *HELD_OUT)}
    assert min(counts.values()) >= 20


def test_episodes_have_the_shape_of_a_rollout():
    for case in CASES:
        actions = case.episode.actions
        assert [action.index for action in actions] == list(range(len(actions)))
        agents = [(action.agent_id, action.turn) for action in actions]
        code = [("executor", 0)] if len(actions) == 3 else [("executor", 0), ("executor", 1)]
        assert agents == [("solver", 0), *code, ("verifier", 0)]
        assert (actions[1].status is ActionStatus.NO_CODE) == (not actions[1].tool_results) == (len(actions) == 3)
        assert all(case.episode.task.prompt in a.prompt_text for a in actions if a.turn == 0)


def test_no_problem_is_of_the_report_split():
    problems = [Problem(text=case.episode.task.prompt, expression="1+1", band=1) for case in CASES]
    assert not [problem for problem in problems if problem.split == "report"]


def test_programs_print_what_their_results_say():
    """Run for real, but those that fail or never end."""
    for case in CASES:
        for action in case.episode.actions:
            if not action.tool_results or not action.tool_results[0].ok:
                continue
            (block,) = code_blocks(action.text)
            assert action.tool_calls[0].arguments["code"] == block
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(block, "planted", "exec"), {})
            assert printed.getvalue() == action.tool_results[0].stdout


def test_programs_that_crash_do_crash_with_that_error():
    crashed = 0
    for case in CASES:
        for action in case.episode.actions:
            if [result.status for result in action.tool_results] == [ToolStatus.NONZERO]:
                expected = action.tool_results[0].stderr.strip().rpartition("\n")[2].partition(":")[0]
                with pytest.raises(Exception) as raised:  # noqa: PT011
                    exec(compile(code_blocks(action.text)[0], "planted", "exec"), {})
                assert raised.type.__name__ == expected
                crashed += 1
    assert crashed >= 60


def test_a_wrong_program_is_at_fault_only_where_the_formula_it_was_handed_is_right():
    for case in [*of("changed_formula"), *of("number_miscopied_into_code"), *of("verdict_forged_in_code")]:
        assert case.faults == (1,)
        assert output_value(case.episode.actions[1]) != int(case.episode.task.reference or "")


@pytest.mark.parametrize(
    ("template", "faults", "innocent"),
    [
        ("clean", (), (0, 1, 2, 3)),
        ("wrong_formula", (0,), (1, 2, 3)),
        ("own_crash", (1,), (0, 3)),
        ("nonsense_crashes_the_next", (0,), (1, 2, 3)),
        ("fabricated_result", (2,), (0, 3)),
        ("no_code", (1,), (0, 2)),
        ("no_box", (3,), (0, 1, 2)),
        ("faults_cancel", (0, 1), (3,)),
        ("invented_after_silence", (1, 2), (0, 3)),
        ("wrong_answer_undone_by_verifier", (0, 3), (1, 2)),
    ],
)
def test_who_is_guilty_and_who_is_innocent(template, faults, innocent):
    for case in of(template):
        assert case.faults == faults
        assert case.guilty == (faults[0] if faults else None)
        assert case.innocent_indices == innocent


def test_outcomes():
    right = {"clean", "clean_but_wordy", "faults_cancel", "repaired_by_executor", "misread_output", "own_crash"}
    wrong = {"wrong_formula", "changed_formula", "no_box", "spoilt_box", "padded_wrong_box", "fabricated_result"}
    for case in CASES:
        if case.template in right | wrong:
            assert case.episode.outcome == float(case.template in right), case.episode


def test_a_changed_episode_differs_in_the_guilty_action_alone():
    for case in of("verdict_forged_in_code"):
        for changed in (case.padded(), case.injected()):
            plain, other = case.episode.actions[1], changed.actions[1]
            assert other.text.endswith(plain.text)
            assert len(other.text) > len(plain.text)
            assert replace(changed, actions=case.episode.actions) == case.episode
            assert (*changed.actions[:1], *changed.actions[2:]) == (
                *case.episode.actions[:1],
                *case.episode.actions[2:],
            )
        words = len(case.padded().actions[1].text.split()) - len(case.episode.actions[1].text.split())
        assert words == PADDING_WORDS


def test_nobody_can_be_padded_in_a_clean_episode():
    with pytest.raises(ValueError, match="nobody is guilty"):
        of("clean")[0].padded()


def test_filler_says_nothing_in_numbers():
    assert len(filler(250).split()) == 250
    assert not any(character.isdigit() for character in filler(250))
