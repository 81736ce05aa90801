"""`coach.min_audit`: what it asks, when it refuses, and what it does not ask twice."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hydra import compose, initialize_config_module

from lightning_mappa.audit.floor import REPORT, coach_digest, require_floor
from lightning_mappa.audit.planted import make_cases
from lightning_mappa.build import build
from lightning_mappa.checks import check
from lightning_mappa.coaches.rules import RulesCoach
from lightning_mappa.config import structured
from lightning_mappa.errors import CoachError, ConfigError, ExitCode
from lightning_mappa.fit import fit
from lightning_mappa.types import Episode, Verdict

HERE = __name__


class Sevens:
    """A constant coach that counts what it is asked."""

    name = "sevens"
    asked: ClassVar[list[str]] = []

    def __init__(self, kind: str = "plain") -> None:
        self.kind = kind

    async def score(self, episode: Episode, index: int) -> Verdict:
        Sevens.asked.append(episode.id)
        return Verdict(score=7.0, reason="always", coach=self.name)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MAPPA_CACHE", str(tmp_path / "cache"))
    Sevens.asked.clear()
    return tmp_path / "cache"


def config(*overrides: str) -> Any:
    with initialize_config_module("lightning_mappa.conf", version_base="1.3"):
        cfg = structured(compose("fit", overrides=["output_dir=nowhere", *overrides]))
    check(cfg)
    return cfg


def constant(*overrides: str) -> Any:
    return config(f"coach._target_={HERE}.Sevens", "coach.audit_cases=28", *overrides)


def test_without_a_floor_nobody_is_asked(cache):
    require_floor(constant())
    assert Sevens.asked == []
    assert not cache.exists()


def test_the_rules_pass_and_fit_gives_the_coach_nothing_of_it(capsys):
    cfg = config("coach.min_audit=0.95")
    require_floor(cfg)
    assert "coach rules blames the right agent in 1.000 of" in capsys.readouterr().out
    assert isinstance(build(cfg.coach, "coach"), RulesCoach)


def test_a_coach_below_the_floor_ends_fit_before_there_is_a_folder(tmp_path, capsys):
    folder = tmp_path / "run"
    cfg = constant("coach.min_audit=0.5", f"output_dir={folder}")
    with pytest.raises(CoachError) as refused:
        fit(cfg)
    assert refused.value.exit_code is ExitCode.COACH
    said = str(refused.value)
    assert said.startswith(
        "coach sevens blames the right agent in 0.0 of the cases, less than 0.5 (coach.min_audit); see "
    )
    assert "or run: mappa audit cases=mathchat n_cases=28 seed=0" in said
    assert not folder.exists()


def test_each_action_is_asked_for_once_and_never_again(cache):
    cfg = constant("coach.min_audit=0")
    require_floor(cfg)
    once = len(Sevens.asked)
    assert once == sum(len(case.episode.actions) for case in make_cases(0, 28))
    require_floor(constant("coach.min_audit=0"))
    with pytest.raises(CoachError):
        require_floor(constant("coach.min_audit=0.9"))
    assert len(Sevens.asked) == once
    (report,) = cache.glob(f"audits/*/{REPORT}")
    assert json.loads(report.read_text())["figures"]["blame_accuracy"]["value"] == 0.0
    require_floor(constant("coach.min_audit=0", "+coach.kind=other"))
    assert len(Sevens.asked) == 2 * once


def test_the_hash_is_of_config_and_code_and_not_of_the_floor(tmp_path, monkeypatch):
    def digest(*overrides: str, **fields: Any) -> str:
        return coach_digest(config(*overrides).coach, **{"seed": 0, "n_cases": 28, **fields})

    assert digest() == digest("coach.min_audit=0.3", "coach.audit_cases=30")
    others = [
        digest(),
        digest("coach=shuffled"),
        digest("coach=shuffled", "seed=1"),
        digest(seed=1),
        digest(n_cases=29),
    ]
    assert len(set(others)) == 5
    module = tmp_path / "own_coach_for_floor.py"
    monkeypatch.syspath_prepend(str(tmp_path))
    hashes = []
    for score in (1, 2):
        module.write_text(f"class Own:\n    name = 'own'\n    async def score(self, e, i):\n        return {score}\n")
        sys.modules.pop("own_coach_for_floor", None)
        hashes.append(digest("coach._target_=own_coach_for_floor.Own"))
    assert hashes[0] != hashes[1]


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("coach.min_audit=1.5", "coach.min_audit is 1.5; allowed: 0 to 1, or null for no audit"),
        ("coach.min_audit=often", "coach.min_audit is often; allowed: 0 to 1, or null for no audit"),
        ("coach.audit_cases=5", "coach.audit_cases is 5; allowed: 28 or more"),
    ],
)
def test_what_cannot_be_is_refused(override, sentence):
    with pytest.raises(ConfigError) as refused:
        require_floor(config("coach.min_audit=0.5", override))
    assert str(refused.value) == sentence
