"""Configs of runs that were made before a key moved."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from lightning_mappa.build import build
from lightning_mappa.cli import of_run
from lightning_mappa.coaches.base import with_parts
from lightning_mappa.coaches.llm import LLMCoach
from lightning_mappa.errors import ConfigError
from lightning_mappa.run_folder import RunFolder

KEYS = {"max_missing_rate": 0.5, "missing_window": 8}
PART = {
    "_target_": "lightning_mappa.coaches.llm.LLMCoach",
    "provider": {
        "_target_": "lightning_mappa.coaches.openai_compatible.OpenAICompatibleProvider",
        "model": "m",
        "base_url": "http://127.0.0.1:1/v1",
        "api_key_env": None,
    },
}
COACHES = "lightning_mappa.coaches"
AROUND = {
    "alone": lambda part: part,
    "ensemble": lambda part: {"_target_": f"{COACHES}.ensemble.EnsembleCoach", "coaches": [part, part]},
    "cascade": lambda part: {"_target_": f"{COACHES}.cascade.CascadeCoach", "coaches": [part]},
    "calibrated": lambda part: {"_target_": f"{COACHES}.stateful.CalibratedCoach", "coach": part},
    "a wrapper of several": lambda part: {
        "_target_": f"{COACHES}.stateful.CalibratedCoach",
        "coach": {"_target_": f"{COACHES}.ensemble.EnsembleCoach", "coaches": [part]},
    },
}


@pytest.fixture
def saved(tmp_path):
    def save(coach):
        OmegaConf.save(OmegaConf.create({"coach": coach, "seed": 1}), tmp_path / "config.yaml")
        return tmp_path

    return save


@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND.keys())
def test_the_coach_of_an_older_run_is_built_and_the_runs_own_keys_stay(saved, around):
    folder = saved({**around({**PART, **KEYS}), **KEYS})
    for cfg in (RunFolder.open(folder).config(), of_run(OmegaConf.create({"resume": str(folder)}), [])):
        assert {key: cfg.coach[key] for key in KEYS} == KEYS
        assert cfg.seed == 1
        assert any(isinstance(part, LLMCoach) for part in with_parts(build(cfg.coach, "coach")))


def test_what_is_written_anew_where_nobody_reads_it_is_refused(saved):
    folder = saved(AROUND["ensemble"](PART))
    cfg = of_run(OmegaConf.create({"resume": str(folder)}), ["+coach.coaches.0.max_missing_rate=0.5"])
    with pytest.raises(ConfigError, match=r"coach.coaches\[0\].max_missing_rate is no parameter of .*LLMCoach"):
        build(cfg.coach, "coach")


def test_another_coach_keeps_its_keys(saved):
    part = {"_target_": "my.Coach", **KEYS}
    cfg = RunFolder.open(saved({"_target_": "my.Ensemble", "coaches": [part], "settings": KEYS})).config()
    assert cfg.coach.coaches[0] == part
    assert cfg.coach.settings == KEYS
