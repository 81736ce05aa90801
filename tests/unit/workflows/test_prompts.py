import pytest

from lightning_mappa.errors import ConfigError
from lightning_mappa.types import Task, ToolResult, ToolStatus
from lightning_mappa.workflows.base import Message
from lightning_mappa.workflows.prompts import PromptTemplate, observation, tool_output, user_prompt

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


def result(stdout="", status=ToolStatus.OK, **fields):
    return ToolResult(status=status, stdout=stdout, **fields)


def test_an_observation_reads_every_result_and_the_last_one():
    results = [result("one"), result("0123456789", stderr="abcdef")]
    source = "{{ results | length }}|{{ result.stdout }}|{{ result.stderr }}|{{ result.ok }}"
    assert observation(results, template(source)) == "2|0123456789|abcdef|True"


def test_a_fault_in_the_observation_template_names_its_own_variables():
    with pytest.raises(ConfigError, match=r"prompts\.observation.*'output' is undefined; allowed.* result, results"):
        observation([result()], template("{{ output }}", key="prompts.observation"))


def test_what_later_agents_see_of_a_run():
    assert tool_output(result("42\n", stderr="a warning")) == "42"
    failed = result("", stderr="Boom\n", status=ToolStatus.NONZERO, reason="exit 1")
    assert tool_output(failed) == "Boom\n[nonzero] exit 1"
    assert tool_output(result("", status=ToolStatus.TIMEOUT)) == "[timeout]"
