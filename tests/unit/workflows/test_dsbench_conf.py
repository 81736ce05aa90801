"""The team on tables as its YAMLs have it: who makes what, and what each agent reads."""

from __future__ import annotations

from typing import Any

import pytest
from hydra import compose, initialize_config_module

from lightning_mappa.build import build
from lightning_mappa.types import Task
from lightning_mappa.workflows.base import Message
from lightning_mappa.workflows.prompts import PromptTemplate, user_prompt

TASK = Task(
    id="t",
    kind="tables/regression",
    prompt="Each row is a flat. Predict rent.",
    metadata={"columns": ["id", "area", "rent"], "metric": "rmsle", "sample": "id,rent\n31,0\n", "targets": ["rent"]},
)
SEEN = (Message(agent_id="engineer", role="Data Engineer", text="the engineer's summary"),)
AGENTS = ("engineer", "modeler", "analyst")
PROMPTS = ("paper", "short", "brief")


@pytest.fixture(scope="module")
def configs() -> dict[str, Any]:
    with initialize_config_module("lightning_mappa.conf", version_base="1.3"):
        return {name: compose("fit", overrides=["experiment=dsbench", f"prompts={name}"]) for name in PROMPTS}


def test_three_agents_with_a_tool_and_four_turns_and_files_that_fit_together(configs):
    cfg = configs["paper"]
    assert list(build(cfg.workflow, "workflow").agent_ids) == list(cfg.agents) == list(AGENTS)
    assert {(agent.max_turns, *agent.tools) for agent in cfg.agents.values()} == {(4, "python")}
    stages = cfg.workflow.stages
    assert [list(stages[agent].makes) for agent in AGENTS] == [
        ["X_train.pkl", "y_train.pkl", "X_test.pkl"],
        ["model.pkl"],
        ["submission.csv"],
    ]
    there = {"train.csv", "test.csv", "sample_submission.csv"}
    for agent in AGENTS:
        assert set(stages[agent].needs) <= there
        there |= set(stages[agent].makes)
    assert cfg.coach.coach.stages == stages


def read(cfg: Any, agent: str, missing: list[str]) -> str:
    template = PromptTemplate(cfg.agents[agent].user, agent_id=agent, key="user")
    extra = {
        "files": ["train.csv (came with the task)", "X_train.pkl (9 bytes, written by Data Engineer in turn 1)"],
        "missing": missing,
        "makes": list(cfg.workflow.stages[agent].makes),
    }
    return user_prompt(template, TASK, SEEN if agent != "engineer" else (), extra)


@pytest.mark.parametrize("prompts", PROMPTS)
@pytest.mark.parametrize("agent", AGENTS)
def test_what_each_agent_reads(configs, prompts, agent):
    text = read(configs[prompts], agent, [])
    warned = read(configs[prompts], agent, ["a.pkl", "b.pkl"])
    assert "a.pkl" not in text
    if agent != "engineer":
        assert "a.pkl" in warned
        assert "b.pkl" in warned
    assert "\n\n\n" not in text + warned
    if prompts == "brief":
        assert "\n" not in text
        return
    assert TASK.prompt in text
    for path in configs[prompts].workflow.stages[agent].makes:
        assert path in text
    assert "```python" in text
    if prompts == "paper":
        assert "- X_train.pkl (9 bytes, written by Data Engineer in turn 1)\n" in text
        assert "id, area, rent" in text
        assert "id,rent\n31,0\n" in text
        assert ("the engineer's summary" in text) == (agent != "engineer")
        assert "WARNING: you need a.pkl, b.pkl, and they are not there." in warned
