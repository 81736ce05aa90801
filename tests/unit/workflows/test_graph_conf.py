"""The topologies that come as YAML: composed with every set of prompts, and played by real seats."""

from __future__ import annotations

import asyncio

import pytest
from hydra import compose, initialize_config_module
from omegaconf import DictConfig, OmegaConf

from lightning_mappa.build import build
from lightning_mappa.config import AgentConfig
from lightning_mappa.types import Task
from lightning_mappa.workflows.graph import GraphWorkflow
from lightning_mappa.workflows.prompts import PromptTemplate
from tests.unit.workflows.table import Sums, Table, spec, tools

TASK = Task(id="t", kind="math", prompt="How much is ${2 + 3}$ {{ really }}?", reference="50000")
WORKFLOWS = ("debate", "critic_loop", "router")
PROMPTS = ("paper", "short", "brief")


def composed(workflow: str, prompts: str) -> DictConfig:
    with initialize_config_module("lightning_mappa.conf", version_base="1.3"):
        return compose(
            overrides=[
                f"+workflow={workflow}",
                f"+prompts={prompts}",
                *("+optimizer.lr=1e-6", "+model.path=tiny", "+strategy=single_device"),
                *("+engine.num_engines=1", "+engine.tensor_parallel_size=1"),
            ]
        )


def play(cfg: DictConfig, answers: dict[str, list[str]], **changes: object) -> tuple[str, Table]:
    table = Table(answers)
    workflow = build(cfg.workflow, "workflow")
    assert isinstance(workflow, GraphWorkflow)
    seats = {}
    for name in workflow.agent_ids:
        agent = cfg.agents[name]
        seats[name] = table.seat(
            spec(
                name,
                role=agent.role,
                system=agent.system,
                user=PromptTemplate(agent.user, agent_id=name, key="user"),
                tools=tools(Sums()) if agent.tools else (),
                max_turns=agent.get("max_turns", 1),
                context_length=8000,
                **changes,
            )
        )
    return asyncio.run(workflow.run(TASK, seats)), table


def asked(table: Table) -> list[tuple[str, str]]:
    return [(action.agent_id, action.prompt_text) for action in table.actions]


@pytest.mark.parametrize("prompts", PROMPTS)
@pytest.mark.parametrize("workflow", WORKFLOWS)
def test_agents_fit_the_schema_and_the_workflow(workflow, prompts):
    cfg = composed(workflow, prompts)
    assert set(build(cfg.workflow, "workflow").agent_ids) == set(cfg.agents)
    for agent in cfg.agents.values():
        node = OmegaConf.merge(AgentConfig, OmegaConf.to_container(agent, resolve=True))
        assert node.user
        assert node.max_new_tokens > 0


@pytest.mark.parametrize("prompts", PROMPTS)
def test_a_debate(prompts):
    answers = {"first": ["f1", "f2"], "second": ["<think>hm</think>s1", "s2"], "judge": [r"\boxed{5}"]}
    answer, table = play(composed("debate", prompts), answers)
    assert answer == r"\boxed{5}"
    said = asked(table)
    assert [agent for agent, _ in said] == ["first", "second", "first", "second", "judge"]
    assert all(TASK.prompt in text for _, text in said[:2])
    assert "f1" not in said[1][1]
    if prompts != "brief":
        assert "s1" in said[2][1]
        assert "f1" in said[3][1]
        assert "f2" not in said[3][1]
        assert "f2" in said[4][1]
    assert "s2" in said[4][1]
    assert not any("hm" in text or "50000" in text for _, text in said)


@pytest.mark.parametrize("prompts", PROMPTS)
def test_a_critic_loop(prompts):
    answers = {"author": ["v1", r"v2 \boxed{5}"], "critic": ["not ACCEPTED: 2 is wrong", "**ACCEPTED**"]}
    answer, table = play(composed("critic_loop", prompts), answers)
    assert answer == r"v2 \boxed{5}"
    said = asked(table)
    assert [agent for agent, _ in said] == ["author", "critic", "author", "critic"]
    assert "v1" in said[1][1]
    assert "v2" in said[3][1]
    if prompts != "brief":
        assert "2 is wrong" in said[2][1]


@pytest.mark.parametrize("prompts", PROMPTS)
@pytest.mark.parametrize(
    ("said", "agents"),
    [("CODE", ["router", "coder", "coder"]), ("REASON", ["router", "reasoner"]), ("hmm", ["router", "reasoner"])],
)
def test_a_router(said, agents, prompts):
    answers = {"router": [said], "coder": ["sum(2+3)", r"\boxed{5}"], "reasoner": [r"\boxed{5}"]}
    answer, table = play(composed("router", prompts), answers)
    assert answer == r"\boxed{5}"
    assert [agent for agent, _ in asked(table)] == agents
    assert TASK.prompt in table.actions[1].prompt_text


@pytest.mark.parametrize("prompts", ["paper", "short"])
def test_prompts_ask_for_what_the_topology_listens_to(prompts):
    cfg = composed("critic_loop", prompts)
    assert "ACCEPTED" in cfg.agents.critic.user
    cfg = composed("router", prompts)
    assert "CODE" in cfg.agents.router.user


@pytest.mark.parametrize("prompts", PROMPTS)
def test_one_agent_alone_may_write_as_much_as_the_team_of_mathchat(prompts):
    """Three agents, of which the executor has two turns."""
    with initialize_config_module("lightning_mappa.conf", version_base="1.3"):
        team = compose("fit", overrides=[f"prompts={prompts}"])
        alone = compose("fit", overrides=["experiment=single_agent", f"prompts={prompts}"])
    budget = sum(agent.max_new_tokens * agent.max_turns for agent in team.agents.values())
    assert [agent.max_new_tokens * agent.max_turns for agent in alone.agents.values()] == [budget]
    assert alone.agents.solver.tools == team.agents.executor.tools
    assert alone.tools == team.tools


def test_without_training_nothing_moves():
    with initialize_config_module("lightning_mappa.conf", version_base="1.3"):
        cfg = compose("fit", overrides=["experiment=no_training"])
    assert {agent.lr for agent in cfg.agents.values()} == {0.0}
    assert cfg.trainer.max_steps > 1
