import subprocess
import sys

import pytest

from lightning_mappa.errors import ConfigError
from lightning_mappa.runtime.cluster_environment import ExternalRanks
from lightning_mappa.strategies.build import build_strategy, check_checkpoint
from lightning_mappa.strategies.zero import zero_config


def build(name, ranks):
    return build_strategy(name, accelerator="cpu", ranks=ranks, deadline_s=60, grad_clip=1.0)


def test_a_single_device_is_what_the_trainer_takes_by_itself():
    assert build("single_device", None) == "auto"
    assert build("single_device", ExternalRanks(0, 1, "127.0.0.1", 1)) == "auto"


@pytest.mark.parametrize(
    ("name", "ranks", "message"),
    [
        ("single_device", ExternalRanks(0, 2, "127.0.0.1", 1), "devices=2; allowed for more: zero2, zero3"),
        ("zero3", None, "strategy=zero3 needs ranks of its own: runtime=ray starts them; allowed here: single_device"),
        ("ddp", None, "strategy.*ddp.*allowed.*single_device, zero2, zero3, zero3_offload"),
    ],
)
def test_what_cannot_be_is_refused(name, ranks, message):
    with pytest.raises(ConfigError, match=message):
        build(name, ranks)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"strategy=zero2 needs DeepSpeed: pip install lightning-mappa\[deepspeed\]"):
        build("zero2", ExternalRanks(0, 2, "127.0.0.1", 1))


def test_nothing_is_imported_of_deepspeed_before_it_is_used():
    program = "import sys, lightning_mappa.agent_trainer; sys.exit('deepspeed' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=120).returncode == 0


def test_clipping_is_left_to_deepspeed_and_sums_are_float32():
    config = zero_config(3, offload=True, on_cpu=False, grad_clip=0.5)
    assert config["gradient_clipping"] == 0.5
    assert config["data_types"] == {"grad_accum_dtype": "fp32"}
    assert config["zero_optimization"]["offload_param"]["device"] == "cpu"
    assert "stage3_param_persistence_threshold" not in config["zero_optimization"]
    assert "offload_optimizer" not in zero_config(2, offload=False, on_cpu=True, grad_clip=0.0)["zero_optimization"]


def checkpoint(folder, *, stage, ranks):
    (folder / "checkpoint").mkdir(parents=True)
    for rank in range(ranks):
        (folder / "checkpoint" / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").touch()
        if stage == 3:
            (folder / "checkpoint" / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt").touch()
    if stage == 2:
        (folder / "checkpoint" / "mp_rank_00_model_states.pt").touch()
    return folder


def test_a_checkpoint_is_gone_on_from_by_what_saved_it(tmp_path):
    sharded = checkpoint(tmp_path / "sharded.ckpt", stage=3, ranks=2)
    whole = checkpoint(tmp_path / "whole.ckpt", stage=2, ranks=4)
    single = tmp_path / "single.ckpt"
    single.touch()
    check_checkpoint(sharded, "solver", "zero3", 2)
    check_checkpoint(sharded, "solver", "zero3_offload", 2)
    check_checkpoint(whole, "solver", "zero2", 4)
    check_checkpoint(single, "solver", "single_device", 1)
    for part, name, size, message in (
        (
            sharded,
            "zero3",
            4,
            r"agents\.solver\.devices is 4, .*saved on 2 ranks; resume with agents\.solver\.devices=2",
        ),
        (sharded, "zero2", 2, r"agents\.solver\.strategy is zero2, .*saved by zero3"),
        (whole, "zero3", 4, "saved by zero2"),
        (sharded, "single_device", 1, "saved by a zero strategy"),
        (single, "zero3", 2, "saved by strategy=single_device"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_checkpoint(part, "solver", name, size)
