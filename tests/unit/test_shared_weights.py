"""Roles that act with another's weights: what a config may say of them, and what it then means everywhere."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from omegaconf import DictConfig, OmegaConf

from lightning_mappa.agents import agent_facts
from lightning_mappa.checks import check
from lightning_mappa.config import structured
from lightning_mappa.errors import ConfigError
from lightning_mappa.runtime.placement import Cluster, agent_needs, place
from lightning_mappa.shared_weights import DEFAULTS, agent_of, roles_of

SHARED = ("agents.executor.weights=solver", "agents.verifier.weights=solver")


def composed(*overrides: str) -> DictConfig:
    with initialize_config_module("lightning_mappa.conf", version_base="1.3"):
        return compose("fit", overrides=list(overrides))


def checked(*overrides: str) -> DictConfig:
    cfg = structured(composed(*overrides))
    check(cfg)
    return cfg


def test_without_weights_every_role_is_an_agent_of_its_own():
    cfg = checked()
    assert agent_of(cfg.agents) == {"solver": "solver", "executor": "executor", "verifier": "verifier"}
    assert roles_of(cfg.agents) == {"solver": ("solver",), "executor": ("executor",), "verifier": ("verifier",)}


def test_the_shared_policy_is_one_agent_in_three_roles():
    cfg = checked("experiment=shared_policy")
    assert agent_of(cfg.agents) == dict.fromkeys(("solver", "executor", "verifier"), "solver")
    assert roles_of(cfg.agents) == {"solver": ("solver", "executor", "verifier")}
    assert list(agent_facts(cfg)) == ["solver"]


def test_the_owner_may_stand_anywhere_in_the_config():
    cfg = checked("agents.solver.weights=verifier")
    assert roles_of(cfg.agents) == {"executor": ("executor",), "verifier": ("solver", "verifier")}


def test_a_role_has_the_training_keys_of_its_agent_and_its_own_of_everything_else():
    cfg = checked(
        *SHARED,
        *("agents.solver.lr=2e-6", "agents.solver.trained=true", "agents.verifier.max_new_tokens=7"),
        "agents.solver.model={path: tiny, lora: {r: 4}}",
    )
    assert [cfg.agents[role].lr for role in cfg.agents] == [2e-6] * 3
    assert [cfg.agents[role].model.lora.r for role in cfg.agents] == [4] * 3
    assert cfg.agents.executor.max_turns == 2
    assert list(cfg.agents.executor.tools) == ["python"]
    assert cfg.agents.verifier.max_new_tokens == 7
    assert cfg.agents.solver.max_new_tokens == cfg.prompts.max_new_tokens.solver


def test_what_is_changed_for_all_agents_reaches_the_roles_too():
    cfg = checked("experiment=shared_policy", "optimizer.lr=3e-4", "model=tiny_lora")
    assert {agent.lr for agent in cfg.agents.values()} == {3e-4}
    assert all(agent.model.lora is not None for agent in cfg.agents.values())


def test_a_frozen_agent_freezes_its_roles():
    cfg = checked("agents.verifier.weights=executor", "agents.executor.trained=false")
    assert [agent.trained for agent in cfg.agents.values()] == [True, False, False]
    with pytest.raises(ConfigError, match="no agent is trained"):
        checked(*SHARED, "agents.solver.trained=false")


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ["agents.verifier.weights=critic"],
            "agents.verifier.weights names 'critic', no key of agents; allowed: null, solver, executor$",
        ),
        (
            ["agents.verifier.weights=verifier"],
            "agents.verifier.weights names 'verifier' itself, whose weights are its own; "
            "allowed: null, solver, executor$",
        ),
        (
            ["agents.verifier.weights=solver", "agents.solver.weights=executor"],
            "agents.verifier.weights names 'solver', which acts with the weights of 'executor' itself; "
            "allowed: null, executor$",
        ),
        (
            ["agents.solver.weights=executor", "agents.executor.weights=solver"],
            "agents.solver.weights names 'executor', which acts with the weights of 'solver' itself",
        ),
        (["workflow=single", "agents.solver.weights=judge"], "names 'judge', no key of agents; allowed: null$"),
    ],
)
def test_weights_that_lead_nowhere_are_refused(overrides: list[str], sentence: str):
    with pytest.raises(ConfigError, match=sentence):
        checked(*overrides)


@pytest.mark.parametrize(
    ("override", "given"),
    [
        ("lr=2e-6", "2e-06"),
        ("trained=false", "False"),
        ("model={path: other}", "{'path': 'other'}"),
        ("strategy=zero2", "zero2"),
        ("devices=2", "2"),
        ("num_engines=2", "2"),
        ("tensor_parallel_size=2", "2"),
    ],
)
def test_a_role_that_shares_weights_sets_no_training_key_of_its_own(override: str, given: str):
    key = override.partition("=")[0]
    with pytest.raises(ConfigError) as caught:
        checked("agents.verifier.weights=solver", f"agents.verifier.{override}")
    assert str(caught.value) == (
        f"agents.verifier.{key} is {given}, but agents.verifier.weights=solver: roles that share weights are trained "
        f"as one agent; take it out, or set agents.solver.{key}"
    )


def test_the_keys_of_an_agent_are_those_that_the_shipped_default_says_are():
    """What stands below `weights` there, each with the value that counts as not set."""
    path = Path(str(files("lightning_mappa.conf"))) / "agent" / "default.yaml"
    node: Any = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    below = list(node).index("weights") + 1
    assert {key: node[key] for key in list(node)[below:]} == DEFAULTS


def test_a_config_that_a_run_has_written_down_means_the_same():
    cfg = checked(*SHARED, "agents.solver.lr=2e-6", "agents.solver.devices=1")
    written = OmegaConf.create(OmegaConf.to_yaml(cfg, resolve=True))
    assert isinstance(written, DictConfig)
    again = structured(written)
    check(again)
    assert OmegaConf.to_container(again, resolve=True) == OmegaConf.to_container(cfg, resolve=True)


def test_a_fault_of_the_agent_is_said_once_under_the_agents_own_name():
    with pytest.raises(ConfigError, match=r"^agents.verifier.devices is 2, but agents.verifier.strategy=single_device"):
        checked("agents.solver.weights=verifier", "agents.verifier.devices=2", "runtime=ray")


def test_one_set_of_ranks_and_one_engine_are_placed():
    cfg = checked("experiment=shared_policy", "runtime=ray", "engine=vllm", "strategy=zero2", "agents.solver.devices=2")
    placed = place(agent_needs(cfg), Cluster(nodes=1, gpus_per_node=3))
    assert [(one.agent_id, len(one.ranks)) for one in placed.agents] == [("solver", 2)]
    assert [one.group for one in placed.engines] == [("solver",)]
