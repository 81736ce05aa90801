import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_mappa.errors import ConfigError
from lightning_mappa.types import Task, ToolResult, ToolStatus
from lightning_mappa.workflows.base import Message
from lightning_mappa.workflows.prompts import (
    PromptTemplate,
    head_and_tail,
    observation,
    strip_thinking,
    tool_output,
    user_prompt,
)

TASK = Task(id="t", kind="math", prompt="1 + 1", reference="2", metadata={"band": 3})
SEEN = [Message(agent_id="solver", role="Solver", text="two"), Message(agent_id="x", role="X", text="2")]


def template(source, key="agents.solver.user"):
    return PromptTemplate(source, agent_id="solver", key=key)


def test_a_user_prompt_reads_task_seen_and_what_the_workflow_adds():
    source = (
        "{{ task.prompt }}/{{ task.metadata.band }}/{% for m in seen %}{{ m.role }}={{ m.text }} {% endfor %}"
        "{{ round }}"
    )
    assert user_prompt(template(source), TASK, SEEN, {"round": 7}) == "1 + 1/3/Solver=two X=2 7"


@pytest.mark.parametrize("name", ["task", "seen"])
def test_a_workflow_cannot_replace_what_a_prompt_is_about(name):
    assert user_prompt(template("{{ task.prompt }}{{ seen | length }}"), TASK, SEEN, {name: "x"}) == "1 + 12"


@pytest.mark.parametrize(
    "source", ["{{ task.reference }}", "{{ task['reference'] }}", "{{ task | attr('reference') }}"]
)
def test_the_reference_cannot_be_reached(source):
    with pytest.raises(ConfigError, match=r"agents\.solver\.user \(agent solver\).*reference"):
        user_prompt(template(source), TASK, SEEN, {})


def test_the_reference_is_in_nothing_a_template_can_print():
    assert "'2'" not in user_prompt(template("{{ task }}"), TASK, [], {})


def test_an_undefined_variable_names_agent_key_and_what_is_allowed():
    with pytest.raises(
        ConfigError, match=r"agents\.solver\.user \(agent solver\): 'tsak' is undefined; allowed.* seen, task"
    ):
        user_prompt(template("{{ tsak.prompt }}"), TASK, [], {})


@pytest.mark.parametrize("source", ["{{ task.prompt", "{% for x %}", "{{ | }}"])
def test_a_broken_template_is_refused_when_it_is_made(source):
    with pytest.raises(ConfigError, match=r"agents\.solver\.user \(agent solver\), line 1"):
        template(source)


@pytest.mark.parametrize("source", ["{{ task.prompt + 1 }}", "{{ ''.__class__.__mro__ }}", "{{ 1 / 0 }}"])
def test_other_faults_of_a_template_are_config_errors_too(source):
    with pytest.raises(ConfigError, match="agent solver"):
        user_prompt(template(source), TASK, [], {})


def test_task_text_is_never_read_as_a_template():
    task = Task(id="t", kind="math", prompt="{{ 7 * 7 }} {% if %} ${seed}")
    assert user_prompt(template("{{ task.prompt }}"), task, [], {}) == task.prompt


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("plain", "plain"),
        ("<think>a</think>b", "b"),
        ("a<think>b</think>c<think>d</think>e", "ace"),
        ("a</think>\n\nb", "b"),
        ("a</think>b</think>c", "c"),
        ("<think>a</think>b</think>c", "c"),
        ("<think>a<think>b</think>c", "c"),
        ("a<think>b", "a"),
        ("<think>", ""),
        ("a</think>b<think>c", "b"),
        ("", ""),
    ],
)
def test_strip_thinking(text, left):
    assert strip_thinking(text) == left


@given(st.lists(st.sampled_from(["<think>", "</think>", "x", "y "]), max_size=20))
def test_no_tag_survives_and_nothing_is_added(pieces):
    left = strip_thinking("".join(pieces))
    assert "think>" not in left
    assert strip_thinking(left) == left


def test_head_and_tail_counts_what_it_leaves_out():
    assert head_and_tail("abcdefghij", 10) == "abcdefghij"
    assert head_and_tail("abcdefghij", 5) == "abc\n… 5 characters left out …\nij"
    assert head_and_tail("abcdefghij", 1) == "a\n… 9 characters left out …\n"


@given(st.text(), st.integers(1, 20))
def test_head_and_tail_keeps_both_ends(text, limit):
    shown = head_and_tail(text, limit)
    if len(text) <= limit:
        assert shown == text
    else:
        head, _, tail = shown.partition(f"\n… {len(text) - limit} characters left out …\n")
        assert len(head + tail) == limit
        assert text.startswith(head)
        assert text.endswith(tail)


def result(stdout="", status=ToolStatus.OK, **fields):
    return ToolResult(status=status, stdout=stdout, **fields)


def test_an_observation_reads_every_result_and_the_last_one_cut_to_the_limit():
    results = [result("one"), result("0123456789", stderr="abcdef")]
    source = "{{ results | length }}|{{ result.stdout }}|{{ result.stderr }}|{{ result.ok }}"
    assert observation(results, template(source), 4) == (
        "2|01\n… 6 characters left out …\n89|ab\n… 2 characters left out …\nef|True"
    )


def test_a_fault_in_the_observation_template_names_its_own_variables():
    with pytest.raises(ConfigError, match=r"prompts\.observation.*'output' is undefined; allowed.* result, results"):
        observation([result()], template("{{ output }}", key="prompts.observation"), 10)


def test_what_later_agents_see_of_a_run():
    assert tool_output(result("42\n", stderr="a warning"), 100) == "42"
    assert tool_output(result("", stderr="Boom\n", status=ToolStatus.NONZERO, reason="exit 1"), 100) == (
        "Boom\n[nonzero] exit 1"
    )
    assert tool_output(result("", status=ToolStatus.TIMEOUT), 100) == "[timeout]"
