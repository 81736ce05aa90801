"""Planted faults: the guilty action scores lowest, those that passed it on are innocent."""

import asyncio

import pytest

from lightning_mappa.coaches.rules import RulesCoach, text_value
from lightning_mappa.types import ActionStatus, Episode, EpisodeStatus, StopReason, Task, ToolResult, ToolStatus
from tests.unit.factories import make_action

OK, NONZERO, TIMEOUT = ToolStatus.OK, ToolStatus.NONZERO, ToolStatus.TIMEOUT


def action(agent_id, text, *, turn=0, output=None, ran=OK, status=ActionStatus.OK, stop=StopReason.STOP):
    """`output` None is an action that ran no code."""
    results = () if output is None else (ToolResult(status=ran, stdout=output),)
    return make_action(agent_id=agent_id, text=text, turn=turn, status=status, stop_reason=stop, tool_results=results)


def mathchat(solution="(12+7)*3", output="57\n", report="57", answer=r"\boxed{57}", ran=OK):
    """An episode of solver, executor (code, report) and verifier; everything right unless said otherwise."""
    code = action("executor", f"```python\nprint({solution})\n```", output=output, ran=ran)
    report_turn = action("executor", report, turn=1)
    return [action("solver", solution), code, report_turn, action("verifier", answer)]


def scores(actions, reference="57", status=EpisodeStatus.OK):
    task = Task(id="t", kind="arithmetic/2", prompt="?", reference=reference)
    episode = Episode(id="e", task=task, actions=tuple(actions), status=status)
    coach = RulesCoach()
    verdicts = [asyncio.run(coach.score(episode, index)) for index in range(len(actions))]
    assert all(verdict.coach == "rules" for verdict in verdicts)
    assert all(verdict.reason and "\n" not in verdict.reason for verdict in verdicts)
    return [verdict.score for verdict in verdicts]


SOLVER, CODE, REPORT, VERIFIER = range(4)


@pytest.mark.parametrize(
    ("guilty", "episode", "expected"),
    [
        pytest.param(None, mathchat(), [10, 10, 10, 10], id="all right"),
        pytest.param(
            SOLVER,
            mathchat("(12+7)+3", "22\n", "22", r"\boxed{22}"),
            [2, 8, 10, 8],
            id="wrong operator, passed on by all",
        ),
        pytest.param(
            SOLVER,
            mathchat("(12+7*3", "", "error", r"\boxed{error}", ran=NONZERO),
            [1, 7, 8, 8],
            id="an expression without a value",
        ),
        pytest.param(
            SOLVER,
            mathchat("12//0", "", "error", r"\boxed{error}", ran=NONZERO),
            [1, 7, 8, 8],
            id="division by zero",
        ),
        pytest.param(SOLVER, mathchat("12+7)", "19\n", "19", r"\boxed{19}"), [1, 7, 10, 8], id="repaired in vain"),
        pytest.param(CODE, mathchat(output="40\n", report="40", answer=r"\boxed{40}"), [10, 2, 10, 8], id="wrong code"),
        pytest.param(
            CODE, mathchat(output="", report="empty", answer=r"\boxed{empty}"), [10, 1, 8, 8], id="prints nothing"
        ),
        pytest.param(
            CODE,
            mathchat(output="", report="error", answer=r"\boxed{error}", ran=NONZERO),
            [10, 1, 8, 8],
            id="syntax error",
        ),
        pytest.param(
            CODE, mathchat(output="", report="57", answer=r"\boxed{57}", ran=TIMEOUT), [10, 1, 9, 10], id="timeout"
        ),
        pytest.param(REPORT, mathchat(report="58", answer=r"\boxed{58}"), [10, 10, 1, 8], id="misreported"),
        pytest.param(REPORT, mathchat(report="58"), [10, 10, 1, 10], id="misreported, but the verifier knows"),
        pytest.param(VERIFIER, mathchat(answer=r"\boxed{58}"), [10, 10, 10, 1], id="off by one in the box"),
        pytest.param(VERIFIER, mathchat(answer="57"), [10, 10, 10, 0], id="no box"),
        pytest.param(VERIFIER, mathchat(answer=r"\boxed{57"), [10, 10, 10, 0], id="box never closed"),
        pytest.param(VERIFIER, mathchat(answer=r"\boxed{}"), [10, 10, 10, 1], id="empty box"),
        pytest.param(
            VERIFIER,
            mathchat(answer=r"57, so \boxed{57}, no, \boxed{5}"),
            [10, 10, 10, 1],
            id="the last box counts",
        ),
        pytest.param(
            SOLVER, mathchat("(12+7)+3", "57\n"), [2, 10, 10, 10], id="a wrong expression repaired by the executor"
        ),
    ],
)
def test_planted_fault(guilty, episode, expected):
    got = scores(episode)
    assert got == expected
    if guilty is not None:
        assert got.index(min(got)) == guilty
        assert all(score >= 7 for index, score in enumerate(got) if index != guilty)


def test_two_faults_blame_two_actions():
    assert scores(mathchat("12+7+3", "23\n", "23", r"\boxed{24}")) == [2, 2, 10, 1]
    assert scores(mathchat("12+7+3", "22\n", "23", r"\boxed{23}")) == [2, 8, 1, 8]


def test_a_report_may_name_what_it_disagrees_with():
    repaired = mathchat("12+7+3", "57\n", "It printed 57, not the proposed 22.")
    assert scores(repaired) == [2, 10, 10, 10]
    assert scores(mathchat("12+7+3", "57\n", "It printed 58, not the proposed 22."))[REPORT] == 1
    assert scores(mathchat("12+7+3", "57\n", "It printed 57, or so: 58."))[REPORT] == 1


def test_executor_without_code():
    episode = [
        action("solver", "(12+7)*3"),
        action("executor", "57", status=ActionStatus.NO_CODE),
        action("verifier", r"\boxed{57}"),
    ]
    assert scores(episode) == [10, 0, 10]


def test_second_program_is_judged_as_code():
    first = action("executor", "```python\n1/\n```", output="", ran=NONZERO)
    second = action("executor", "```python\nprint(57)\n```", turn=1, output="57\n")
    episode = [action("solver", "(12+7)*3"), first, second, action("verifier", r"\boxed{57}")]
    assert scores(episode) == [10, 1, 10, 10]


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("First 12 + 7 = 19, then times 3. The answer is 57.", 10),
        ("So we get $\\boxed{57}$ after 3 steps", 10),
        ("That gives 1,057 in the end", 2),
        ("It is 57.5", 1),
        ("I do not know", 1),
        ("The answer is 58.", 2),
        ("57.", 10),
        ("$57$.", 10),
        ("57 58", 1),
        ("", 1),
    ],
)
def test_solver_in_prose(text, score):
    assert scores([action("solver", text), *mathchat()[1:]])[SOLVER] == score


@pytest.mark.parametrize(
    ("text", "score"),
    [("To get 57, first add", 1), (r"So \boxed{57} and", 10), ("(12+7)*3", 10)],
    ids=["prose", "after its box", "an expression"],
)
def test_the_last_number_of_prose_that_was_cut_is_no_result(text, score):
    solution = action("solver", text, stop=StopReason.LENGTH)
    assert scores([solution, *mathchat()[1:]])[SOLVER] == score


@pytest.mark.parametrize(
    ("answer", "score"),
    [(r"\boxed{57}", 10), (r"It is \boxed{057}.", 10), (r"\boxed{58}", 1), ("57", 0), ("", 0)],
)
def test_single_agent(answer, score):
    assert scores([action("single", answer)]) == [score]


def test_single_agent_with_a_tool():
    code = action("single", "```python\nprint(57)\n```", output="57\n")
    assert scores([code, action("single", r"\boxed{57}", turn=1)]) == [10, 10]
    assert scores([code, action("single", "57", turn=1)]) == [10, 0]


def test_all_accepted_references_are_right():
    episode = mathchat("80", "80\n", "81", r"\boxed{81}")
    assert scores(episode, reference="080 or 081 (both were accepted)") == [10, 10, 9, 10]


def test_prompt_too_long_has_no_score():
    episode = [*mathchat()[:3], action("verifier", "", status=ActionStatus.PROMPT_TOO_LONG)]
    assert scores(episode) == [10, 10, 10, None]


@pytest.mark.parametrize(
    ("episode", "expected"),
    [
        # Nothing printed, and the report says so; who makes up for it has done so.
        (mathchat(output="", ran=ToolStatus.SANDBOX_ERROR, report="error"), [10, None, 8, 10]),
        (mathchat(output="", ran=ToolStatus.SANDBOX_ERROR, report="57"), [10, None, 9, 10]),
        # What the code would have said nobody knows: not who reports it, nor who answers from it.
        (mathchat(output="", ran=ToolStatus.SANDBOX_ERROR, report="40", answer=r"\boxed{41}"), [10, None, None, None]),
        (
            mathchat("12+7+3", "", "22", r"\boxed{22}", ran=ToolStatus.SANDBOX_ERROR),
            [2, None, None, 8],
        ),
        # No box, and a right number made wrong, need no code.
        (mathchat(output="", ran=ToolStatus.SANDBOX_ERROR, report="error", answer="40"), [10, None, 8, 0]),
        (mathchat(output="", ran=ToolStatus.SANDBOX_ERROR, report="57", answer=r"\boxed{40}"), [10, None, 9, 1]),
    ],
)
def test_a_sandbox_that_failed_is_nobodys_fault(episode, expected):
    assert scores(episode) == expected


@pytest.mark.parametrize("reference", [None, "x+1"])
def test_without_a_reference_only_form_and_faith_are_scored(reference):
    assert scores(mathchat(), reference) == [None, None, 10, None]
    assert scores(mathchat(report="58", answer="58"), reference) == [None, None, 1, 0]
    assert scores(mathchat("12+", "", "error", "none", ran=NONZERO), reference) == [1, 7, 8, 0]


def test_last_action_of_a_failed_episode_is_not_taken_for_the_answer():
    assert scores([action("solver", "(12+7)*3")], status=EpisodeStatus.FAILED) == [10]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("(12+7)*3", 57),
        (" -5 ", -5),
        ("x = -5", -5),
        ("12-7", 5),
        ("it is 12-7", 7),
        ("First this, then that:\n(12+7)*3", 57),
        ("First this, then that:\n(12+7)*3.\n", 57),
        ("First this, then that:\n(12+*3", None),
        ("What is left:\n- 57", 57),
        ("What is left:\n57", 57),
        ("12+7\nis the total of 19", 19),
        ("the total is 1,234,567", 1234567),
        ("they get 57.0", 57),
        ("they get 57.5", None),
        (r"so \boxed{1/2}, near 57", None),
        ("((12", None),
        ("nothing", None),
    ],
)
def test_value_of_a_text(text, value):
    assert text_value(text) == value
