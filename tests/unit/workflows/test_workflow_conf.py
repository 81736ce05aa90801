"""The workflow and prompt YAMLs, composed as a run composes them and rendered."""

import pytest
from hydra import compose, initialize_config_module
from hydra.utils import instantiate
from omegaconf import OmegaConf

from lightning_mappa.config import AgentConfig
from lightning_mappa.types import Task, ToolResult, ToolStatus
from lightning_mappa.workflows.base import Message
from lightning_mappa.workflows.prompts import PromptTemplate, observation, user_prompt

TASK = Task(id="t", kind="math", prompt="How much is ${2 + 3}$ {{ really }}?", reference="50000")
SEEN = (
    Message(agent_id="solver", role="Problem Solver", text="the solver's text"),
    Message(agent_id="executor", role="Code Executor", text="the executor's text", tool_output="the output"),
)
READS = {"solver": 0, "executor": 1, "verifier": 2}


def composed(workflow, prompts):
    with initialize_config_module("lightning_mappa.conf", version_base="1.3"):
        return compose(
            overrides=[
                f"+workflow={workflow}",
                f"+prompts={prompts}",
                "+optimizer.lr=1e-6",
                "+model.path=tiny",
                "+strategy=single_device",
                "+engine.num_engines=1",
                "+engine.tensor_parallel_size=1",
            ]
        )


@pytest.mark.parametrize("prompts", ["paper", "short", "brief"])
@pytest.mark.parametrize("workflow", ["mathchat", "single"])
def test_agents_fit_the_schema_and_the_workflow(workflow, prompts):
    cfg = composed(workflow, prompts)
    assert list(instantiate(cfg.workflow).agent_ids) == list(cfg.agents)
    for agent_id, agent in cfg.agents.items():
        node = OmegaConf.merge(AgentConfig, OmegaConf.to_container(agent, resolve=True))
        key = "single" if workflow == "single" else agent_id
        assert node.user == cfg.prompts[key].user
        assert node.max_new_tokens == cfg.prompts.max_new_tokens[key]
        assert (node.lr, node.model.path, node.strategy, node.trained) == (1e-6, "tiny", "single_device", True)


def test_mathchat_is_solver_executor_verifier_with_a_tool_in_the_middle():
    cfg = composed("mathchat", "paper")
    assert {name: (a.max_turns, list(a.tools)) for name, a in cfg.agents.items()} == {
        "solver": (1, []),
        "executor": (2, ["python"]),
        "verifier": (1, []),
    }
    assert {agent.max_new_tokens for agent in cfg.agents.values()} == {4096}


@pytest.mark.parametrize("prompts", ["paper", "short"])
@pytest.mark.parametrize("visibility", ["full", "partial"])
@pytest.mark.parametrize("agent_id", READS)
def test_every_prompt_shows_the_task_and_what_the_agent_may_see(agent_id, visibility, prompts):
    """OmegaConf's `${` in a task and Jinja's braces in a prompt do not meet."""
    agent = composed("mathchat", prompts).agents[agent_id]
    seen = SEEN[: READS[agent_id]] if visibility == "full" else SEEN[: READS[agent_id]][-1:]
    text = user_prompt(PromptTemplate(agent.user, agent_id=agent_id, key="user"), TASK, seen, {})
    assert TASK.prompt in text
    assert all((message.text in text) == (message in seen) for message in SEEN)
    assert ("the output" in text) == (SEEN[1] in seen)
    assert "50000" not in text
    assert ("\\boxed{" in text) == (agent_id != "executor")
    assert "\n\n\n" not in text


@pytest.mark.parametrize("prompts", ["paper", "short"])
def test_the_executor_is_told_how_code_is_written(prompts):
    assert "```python" in composed("mathchat", prompts).agents.executor.user


def test_the_observation_says_what_was_printed_or_what_went_wrong():
    template = PromptTemplate(composed("mathchat", "paper").prompts.observation, agent_id="executor", key="o")
    fine = ToolResult(status=ToolStatus.OK, stdout="12\n", stderr="a warning")
    silent = ToolResult(status=ToolStatus.OK)
    failed = ToolResult(status=ToolStatus.NONZERO, stderr="NameError: x\n", reason="exit code 1")
    assert observation([fine], template) == "Output:\n12\n"
    assert observation([silent], template) == "Output:\n(nothing was printed)\n"
    assert observation([failed], template) == "The program failed (nonzero: exit code 1).\nNameError: x\n"
    assert observation([fine, failed], template).count("\n") == 4


def test_the_short_observation_keeps_the_end_of_an_error():
    template = PromptTemplate(composed("mathchat", "short").prompts.observation, agent_id="executor", key="o")
    failed = ToolResult(status=ToolStatus.NONZERO, stderr="x" * 500 + "NameError: y\n", reason="exit code 1")
    shown = observation([failed], template)
    assert "exit code 1" in shown
    assert "NameError: y" in shown
    assert len(shown) < 300
    assert "12" in observation([ToolResult(status=ToolStatus.OK, stdout="12\n")], template)
    assert "nothing" in observation([ToolResult(status=ToolStatus.OK)], template)


@pytest.mark.parametrize("agent_id", [*READS, "single"])
def test_the_brief_prompts_are_one_line(agent_id):
    source = composed("mathchat", "brief").prompts[agent_id].user
    text = user_prompt(PromptTemplate(source, agent_id=agent_id, key="user"), TASK, SEEN[: READS.get(agent_id, 0)], {})
    assert "\n" not in text
