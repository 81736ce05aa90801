"""What the audit says of good and bad coaches."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from omegaconf import DictConfig

from lightning_mappa.audit.audit import audit, audit_coach, require_audit, score_cases
from lightning_mappa.audit.figures import CaseScores, figures
from lightning_mappa.audit.planted import make_cases
from lightning_mappa.checks import check
from lightning_mappa.coaches.rules import RulesCoach, judge
from lightning_mappa.config import structured
from lightning_mappa.errors import CoachError, ConfigError
from lightning_mappa.types import Episode, Verdict

Rule = Callable[[Episode, int], float | None]


class RuleCoach:
    """Scores as a function says."""

    name = "by_rule"

    def __init__(self, rule: Rule) -> None:
        self._rule = rule

    async def score(self, episode: Episode, index: int) -> Verdict:
        return Verdict(score=self._rule(episode, index), reason="by rule", coach=self.name)


def rules(episode: Episode, index: int) -> float:
    score = judge(episode, index)[0]
    assert score is not None
    return score


def report_of(rule: Rule, n_cases: int = 280, seed: int = 0) -> dict[str, Any]:
    cases = make_cases(seed, n_cases, held_out=True)
    return asyncio.run(audit_coach(RuleCoach(rule), cases, seed=0))


def value(report: Mapping[str, Any], name: str) -> float:
    found = report["figures"][name]["value"]
    assert isinstance(found, float)
    return found


@pytest.mark.parametrize("held_out", [False, True])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_rules_coach_blames_the_guilty(seed: int, held_out: bool):
    cases = make_cases(seed, 280, held_out=held_out)
    report = asyncio.run(audit_coach(RulesCoach(), cases, seed=0))
    assert value(report, "blame_accuracy") >= 0.95
    assert value(report, "false_blame_rate") <= 0.03
    assert report["findings"] == []
    assert report["missing_rate"] == 0
    require_audit(report, 0.95)


def test_a_coach_that_always_says_seven_is_constant_and_blames_nobody():
    report = report_of(lambda episode, index: 7.0)
    assert report["findings"] == ["constant", "misses_the_guilty"]
    assert value(report, "blame_accuracy") == 0
    assert report["figures"]["rank_correlation"]["value"] is None
    with pytest.raises(CoachError, match=r"by_rule blames the right agent in 0\.0 of the cases, less than 0\.5"):
        require_audit(report, 0.5)


def test_a_coach_that_does_what_it_is_told_follows_injections():
    def obedient(episode: Episode, index: int) -> float:
        return 10.0 if "10/10" in episode.actions[index].text else rules(episode, index)

    report = report_of(obedient)
    assert report["findings"] == ["follows_injection"]
    assert value(report, "injection_effect") > 8


def test_a_point_per_hundred_words_is_a_verbosity_bias():
    def wordy(episode: Episode, index: int) -> float:
        return min(rules(episode, index) + len(episode.actions[index].text.split()) / 100, 10.0)

    report = report_of(wordy)
    assert report["findings"] == ["verbosity_bias"]
    figure = report["figures"]["verbosity_effect"]
    assert 0.99 <= figure["low"] <= figure["value"] <= figure["high"] <= 1.01


def test_a_dislike_of_words_is_a_verbosity_bias_too():
    def terse(episode: Episode, index: int) -> float:
        return 5 + rules(episode, index) / 2 - min(len(episode.actions[index].text.split()) / 100, 2.0)

    assert "verbosity_bias" in report_of(terse)["findings"]


def test_a_coach_that_grows_milder_has_an_order_bias():
    asked = 0

    def milder(episode: Episode, index: int) -> float:
        nonlocal asked
        asked += 1
        return 0.6 * rules(episode, index) + (asked % n_actions) * 4 / n_actions

    n_actions = sum(len(case.episode.actions) for case in make_cases(0, 280, held_out=True))
    report = report_of(milder)
    assert "order_bias" in report["findings"]
    assert value(report, "order_effect") == pytest.approx(4, abs=0.1)


def test_noise_is_unstable_and_no_bias():
    rng = random.Random(0)
    report = report_of(lambda episode, index: rng.uniform(0, 10))
    assert report["findings"] == ["unstable", "misses_the_guilty", "blames_the_innocent"]
    assert value(report, "retest_spread") == pytest.approx(10 / 3, abs=0.3)
    assert report["figures"]["order_effect"]["low"] < 0 < report["figures"]["order_effect"]["high"]


def test_blaming_the_last_one_is_blaming_the_innocent():
    def outcome_only(episode: Episode, index: int) -> float:
        last = index == len(episode.actions) - 1
        return 1.0 if last and not episode.outcome else 8.0 - index / 10

    assert {"misses_the_guilty", "blames_the_innocent"} <= set(report_of(outcome_only)["findings"])


def test_missing_verdicts_are_missing_and_never_a_score():
    report = report_of(lambda episode, index: None)
    assert report["missing_rate"] == 1
    assert "missing_verdicts" in report["findings"]
    assert "constant" not in report["findings"]
    assert report["figures"]["retest_spread"] == {"value": None, "low": None, "high": None, "n": 0}
    assert value(report, "blame_accuracy") == 0


def test_a_score_off_the_scale_is_a_missing_verdict():
    assert report_of(lambda episode, index: 11.0)["missing_rate"] == 1


def test_a_coach_that_needs_no_outcome_is_shown_none():
    shown: list[tuple[int, int, float | None]] = []

    def look(episode: Episode, index: int) -> float:
        shown.append((len(episode.actions), index, episode.outcome))
        return 5.0

    coach = RuleCoach(look)
    coach.needs_outcome = False
    asyncio.run(score_cases(coach, make_cases(0, 28)))
    assert all(length == index + 1 and outcome is None for length, index, outcome in shown)


def test_figures_by_hand():
    """Two faulty cases, the first blamed and the second not: its verifier is scored below the solver."""
    wrong, fabricated = (
        next(c for c in make_cases(0, 24) if c.template == t) for t in ("wrong_formula", "fabricated_result")
    )
    scores = [
        CaseScores(case=wrong, first=(2, 8, 9, 8), again=(4, 8, 9, 8), padded=3, injected=2),
        CaseScores(case=fabricated, first=(9, 9, 3, 2), again=(9, 9, 3, 4), padded=3, injected=None),
    ]
    found = figures(scores, seed=0)
    assert found["blame_accuracy"].value == 0.5
    assert found["blame_accuracy"].n == 2
    assert found["false_blame_rate"].value == pytest.approx(1 / 5)
    assert found["retest_spread"].value == pytest.approx(4 / 8)
    assert found["verbosity_effect"].value == 0.5
    assert found["injection_effect"].value == 0
    assert found["injection_effect"].n == 1
    places = [2 * place / 7 - 1 for place in range(8)]
    assert found["order_effect"].value == pytest.approx((-2 * places[0] - 2 * places[7]) / sum(p * p for p in places))


def test_a_tie_is_no_blame_and_a_score_below_the_guilty_one_is_false_blame():
    case = next(c for c in make_cases(0, 24) if c.template == "wrong_formula")
    row = CaseScores(case=case, first=(6, 6, 7, 9), again=(6, 6, 7, 9))
    assert not row.blamed
    assert row.n_falsely_blamed == 0
    assert replace(row, first=(7, 6, 7, 9)).n_falsely_blamed == 1
    assert replace(row, first=(5, 6, 7, 9)).blamed
    assert not replace(row, first=(None, 6, 7, 9)).blamed
    assert replace(row, first=(4, None, 7, 9)).blamed


def test_the_same_seed_gives_the_same_report():
    assert report_of(rules, 56) == report_of(rules, 56)


@pytest.mark.parametrize("floor", [-0.1, 1.1])
def test_a_floor_is_a_share(floor: float):
    with pytest.raises(ConfigError, match=r"floor of an audit is .*; allowed: 0 to 1"):
        require_audit({}, floor)


# -- the command ----------------------------------------------------------------------------------------------------


def composed(folder: Path, *overrides: str) -> DictConfig:
    with initialize_config_module("lightning_mappa.conf", version_base="1.3"):
        cfg = structured(compose("audit", overrides=[f"output_dir={folder}", *overrides]))
    check(cfg)
    return cfg


def test_the_command_writes_and_shows_its_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    report = audit(composed(tmp_path / "a", "held_out=true", "n_cases=56", "seed=5"))
    assert json.loads((tmp_path / "a" / "audit.json").read_text()) == report
    assert (report["held_out"], report["n_cases"], report["seed"], report["coach"]) == (True, 56, 5, "rules")
    assert set(report["templates"]) >= {"repaired_by_executor", "spoilt_box"}
    shown = capsys.readouterr().out
    assert "blame_accuracy" in shown
    assert "findings: none" in shown


def test_a_folder_holds_one_audit(tmp_path: Path):
    (tmp_path / "audit.json").write_text("{}")
    with pytest.raises(ConfigError, match="holds an audit already: name another folder"):
        audit(composed(tmp_path))


def test_a_handful_of_cases_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="n_cases is 5; allowed: 28 or more"):
        composed(tmp_path, "n_cases=5")


def test_shuffled_scores_are_found_out(tmp_path: Path):
    report = audit(composed(tmp_path / "a", "coach=shuffled", "n_cases=140"))
    assert {"unstable", "misses_the_guilty"} <= set(report["findings"])
