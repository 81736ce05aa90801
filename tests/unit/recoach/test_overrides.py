"""Which keys `mappa recoach` reads."""

from __future__ import annotations

from dataclasses import fields

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from lightning_mappa.agent_trainer import LOSS_KEYS
from lightning_mappa.config import AlgorithmConfig, structured
from lightning_mappa.errors import ConfigError
from lightning_mappa.fit import CREDIT_KEYS
from lightning_mappa.recoach.overrides import CLIP_KEYS, MEMORY_KEYS, NEVER, REWARD_KEYS, UPDATE_KEYS, changed, side_of


def config(*overrides):
    with initialize_config_module("lightning_mappa.conf", version_base="1.3"):
        return structured(compose("recoach", overrides=["run=r", *overrides]))


def test_every_key_of_an_algorithm_has_its_place():
    placed = [*CREDIT_KEYS, *REWARD_KEYS, *UPDATE_KEYS, *CLIP_KEYS, *MEMORY_KEYS, *NEVER]
    assert sorted(placed) == sorted({field.name for field in fields(AlgorithmConfig)})
    assert set(LOSS_KEYS) == {*UPDATE_KEYS, *CLIP_KEYS, *MEMORY_KEYS, *NEVER}


def test_the_recorded_side_has_the_runs_algorithm_and_the_new_ones_memory():
    recorded = config()
    cfg = config("algorithm=paper", "algorithm.mini_batch_size=4", "algorithm.micro_batch_size=2")
    side = side_of(recorded, cfg)
    assert (side.algorithm.mini_batch_size, side.algorithm.micro_batch_size) == (16, 2)
    assert side.algorithm.return_scope == recorded.algorithm.return_scope == "action"
    assert cfg.algorithm.return_scope == "trajectory"
    assert "micro_batch_size" not in changed(recorded, cfg)
    assert changed(recorded, cfg)["mini_batch_size"] == [16, 4]


def test_clips_count_where_dropout_moves_ratios():
    overrides = ("algorithm.clip_ratio_high=0.3",)
    with pytest.raises(ConfigError, match="every ratio is 1 and none is clipped"):
        changed(config(), config(*overrides))
    lora = ("model=tiny_lora", "model.lora.dropout=0.1")
    assert changed(config(*lora), config(*lora, *overrides)) == {"clip_ratio_high": [0.2, 0.3]}


def test_a_key_that_an_older_run_lacks_is_what_it_then_was():
    recorded = config()
    plain = OmegaConf.to_container(recorded, resolve=True)
    del plain["algorithm"]["max_skipped_steps"]
    del plain["cases"]
    assert changed(structured(OmegaConf.create(plain)), recorded) == {}
