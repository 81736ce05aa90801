"""Every YAML under conf/ composes, fits the schema, breaks no rule, and names targets that take its keys."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from omegaconf import DictConfig, OmegaConf

from lightning_mappa import cli
from lightning_mappa.checks import check, target_nodes
from lightning_mappa.config import allowed_keys, structured

CONF = Path(str(files("lightning_mappa.conf")))
PLACES = {"agent": "agent@agents.solver", "tool": "tool@tools.python"}
"""Groups that the defaults list puts at another package."""
NEEDS = {
    "model=hf": ["model.path=tiny"],
    "engine=vllm": ["runtime=ray"],
    "strategy=zero2": ["runtime=ray"],
    "strategy=zero3": ["runtime=ray"],
    "strategy=zero3_offload": ["runtime=ray"],
    "task=math_file": ["task.path=x"],
    "task=math_sets": ["task.train.path=fixture/aime", "task.report.path=fixture/amc", "task.report.format=amc"],
    "task=math_hub": ["task.train.repo=own/train", "task.report.repo=own/test"],
    "experiment=smollm2_math": ["task.path=x"],
    "experiment=mathchat_qwen3_4b": ["task.train.path=x", "task.report.path=x"],
    "experiment=mathchat_r1_1_5b": ["task.train.path=x", "task.report.path=x"],
    "experiment=qwen3_4b_lora_24gb": ["task.path=x"],
    "coach=table_rules": ["workflow=dsbench"],
    "coach=table_programs": ["workflow=dsbench"],
    "coach=llm": ["coach.provider={_target_:lightning_mappa.coaches.anthropic.AnthropicProvider,model:m}"],
    "coach=vllm": ["coach.provider.model=tiny"],
    "coach=openai_compatible": ["coach.provider.model=m", "coach.provider.base_url=http://127.0.0.1:8000/v1"],
}
"""What a user has to add, because the option cannot know it, or does not go without it."""

OPTIONS = [
    (path.parent.name, path.stem)
    for path in sorted(CONF.glob("*/*.yaml"))
    if path.parent.name != "hydra"  # read by Hydra itself, in every composition
]


def composed(*overrides: str, command: str = "fit", with_hydra: bool = False) -> DictConfig:
    with initialize_config_module("lightning_mappa.conf", version_base="1.3"):
        return compose(command, overrides=list(overrides), return_hydra_config=with_hydra)


def test_the_groups_are_those_of_the_defaults_list():
    chosen = composed(with_hydra=True).hydra.runtime.choices
    groups = {name.partition("@")[0] for name in chosen if not name.startswith("hydra/")}
    assert groups == {group for group, _ in OPTIONS} | {"hydra"}


@pytest.mark.parametrize(("group", "name"), OPTIONS)
def test_every_option(group: str, name: str):
    choice = f"{PLACES.get(group, group)}={name}"
    if group == "callbacks" and name not in ("default", "weight_sync"):
        choice = f"callbacks=[weight_sync,{name}]"
    cfg = composed(choice, *NEEDS.get(choice, []), "output_dir=out")
    check(structured(cfg))
    assert [key for key, _ in target_nodes(structured(cfg))]


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command(command: str):
    places = cli.COMMANDS[command][1]
    cfg = structured(composed(*(f"{key}=x" for key in places), command=command))
    check(cfg)
    assert [cfg[key] for key in places] == ["x"] * len(places)


@pytest.mark.parametrize("path", sorted(CONF.rglob("*.yaml")), ids=lambda path: str(path.relative_to(CONF)))
def test_every_key_in_a_plain_file_is_known(path: Path):
    """A key the schema does not know is refused at start; here, in our own files, it is refused at once."""
    node: Any = OmegaConf.to_container(OmegaConf.load(path))
    group = path.parent.relative_to(CONF).as_posix()
    open_groups = ("callbacks", "logger", "task", "coach", "tool", "prompts", "hydra")
    if group in open_groups:
        assert node is not None
        return
    base = {".": [], "agent": ["agents", "any"]}.get(group, [group])
    if "@package _global_" in path.read_text():
        base = []
    keys = allowed_keys(base)
    assert keys is not None
    assert set(node) - {"defaults", "hydra"} <= set(keys)


@pytest.mark.parametrize("name", [name for group, name in OPTIONS if group == "sweep"])
def test_a_sweep_varies_keys_of_the_schema(name: str):
    hydra = composed(f"sweep={name}", with_hydra=True).hydra
    assert hydra.mode.name == "MULTIRUN"
    for key in hydra.sweeper.params:
        *parents, leaf = key.split(".")
        assert leaf in (allowed_keys(parents) or [])


# -- what one choice brings along -------------------------------------------------------------------------------


def test_a_model_brings_prompts_optimizer_and_sizes():
    tiny, small = composed("model=tiny"), composed("model=smollm2")
    assert tiny.optimizer.lr > small.optimizer.lr == 1e-6
    assert tiny.prompts.max_new_tokens.solver < 128
    assert {agent.max_new_tokens for agent in small.agents.values()} == {128}
    assert small.datamodule.rollout_batch_size * small.datamodule.n_samples_per_prompt == 8
    assert tiny.prompts.solver != small.prompts.solver


def test_what_the_user_chooses_beats_what_the_model_brings():
    cfg = composed("model=tiny", "prompts=paper", "optimizer=adamw", "agents.solver.max_new_tokens=7")
    assert cfg.optimizer.lr == 1e-6
    assert cfg.prompts.max_new_tokens.solver == 4096
    assert cfg.agents.solver.max_new_tokens == 7


def test_an_experiment_chooses_the_model_and_with_it_the_prompts():
    cfg = composed("experiment=smollm2_math", "task.path=x")
    assert cfg.model.path == "smollm2"
    assert cfg.prompts.max_new_tokens.solver == 128
    assert composed("experiment=smollm2_math", "model=tiny", "task.path=x").model.path == "tiny"


def test_one_agent_may_have_a_model_of_its_own():
    cfg = structured(composed("agents.verifier.model={path: other}", "agents.verifier.lr=1"))
    assert [agent.model.path for agent in cfg.agents.values()] == ["tiny", "tiny", "other"]
    assert [agent.lr for agent in cfg.agents.values()] == [cfg.optimizer.lr, cfg.optimizer.lr, 1.0]


def test_a_workflow_swaps_the_set_of_agents():
    assert list(composed("workflow=single").agents) == ["solver"]
    assert "tools" not in composed("workflow=single")


def test_callbacks_can_be_removed_and_added():
    assert list(composed("~callbacks.kl_penalty").callbacks) == ["weight_sync", "checkpoint_selection"]
    added = composed("callbacks=[default,early_stopping]")
    assert list(added.callbacks)[-1] == "early_stopping"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "default",
            {"return_scope": "action", "baseline": "none", "norm_scope": "agent", "norm_unit": "action"},
        ),
        (
            "paper",
            {
                "return_scope": "trajectory",
                "return_agg": "sum",
                "baseline": "none",
                "norm_scope": "all",
                "norm_unit": "token",
                "return_level": "token",
                "truncated": "mask",
                "mini_batch_size": 16,
            },
        ),
        (
            "reference_code",
            {
                "return_scope": "action",
                "norm_scope": "agent",
                "norm_unit": "token",
                "return_level": "token",
                "loss_agg_mode": "seq-mean-token-mean",
            },
        ),
    ],
)
def test_the_named_algorithms_are_what_they_say(name: str, expected: dict[str, Any]):
    algorithm = composed(f"algorithm={name}").algorithm
    assert {key: algorithm[key] for key in expected} == expected
    assert (algorithm.adv_estimator, algorithm.policy_loss) == ("reinforce_plus_plus", "ppo")
    assert (algorithm.clip_ratio_low, algorithm.clip_ratio_high) == (0.2, 0.2)


def test_hydra_makes_no_folder_for_a_single_run():
    hydra = composed(with_hydra=True).hydra
    assert hydra.output_subdir is None
    assert (hydra.run.dir, hydra.sweep.subdir, hydra.job.chdir) == (".", ".", False)
    assert "file" not in (hydra.job_logging.get("handlers") or {})
