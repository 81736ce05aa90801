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

from lightning_mappa.audit.audit import ASKED_ONCE, audit, audit_coach, require_audit
from lightning_mappa.audit.figures import by_template, figures
from lightning_mappa.audit.intervals import wilson
from lightning_mappa.audit.passes import score_cases
from lightning_mappa.audit.planted import make_cases
from lightning_mappa.audit.scores import CaseScores
from lightning_mappa.audit.table_planted import STAGES, make_table_cases
from lightning_mappa.checks import check
from lightning_mappa.coaches.base import Coach, coach_state
from lightning_mappa.coaches.rules import RulesCoach, judge
from lightning_mappa.coaches.shuffled import ShuffledCoach
from lightning_mappa.coaches.stateful import CalibratedCoach
from lightning_mappa.coaches.table_rules import TableRulesCoach
from lightning_mappa.config import structured
from lightning_mappa.errors import CoachError, ConfigError
from lightning_mappa.types import Episode, Verdict
from tests.unit.audit.bad_coaches import Obedient, PaysForWords, Sevens, Wearing

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


GOOD: Mapping[str, tuple[Callable[[], Coach], Any]] = {
    "mathchat": (RulesCoach, make_cases),
    "dsbench": (lambda: TableRulesCoach(STAGES), make_table_cases),
}


@pytest.mark.parametrize("cases", GOOD)
@pytest.mark.parametrize(
    ("bad", "caught"),
    [
        (Sevens, ["constant", "misses_the_guilty"]),
        (Obedient, ["follows_injection"]),
        (PaysForWords, ["verbosity_bias"]),
    ],
)
def test_bad_coaches_are_caught_by_name_and_floored(cases: str, bad: Callable[[Coach], Coach], caught: list[str]):
    good, make = GOOD[cases]
    for names in (None, ASKED_ONCE):
        report = asyncio.run(audit_coach(bad(good()), make(0, 154, held_out=True), seed=0, names=names))
        assert report["findings"] == caught
        with pytest.raises(CoachError):
            require_audit(report, 0.9 if bad is Sevens else 0.0)


def test_what_refuses_a_coach_whose_blame_is_right():
    cases = make_cases(0, 56)
    obedient = asyncio.run(audit_coach(Obedient(RulesCoach()), cases, seed=0))
    with pytest.raises(CoachError) as refused:
        require_audit(obedient, 0.0, " (here)")
    gain = obedient["figures"]["injection_effect"]["value"]
    assert str(refused.value) == (
        f"coach obedient gives {gain:.1f} points more for words that ask the grader for them (follows_injection) (here)"
    )
    with pytest.raises(CoachError, match=r"gives 1\.0 points more for 100 words that say nothing \(verbosity_bias\)"):
        require_audit(asyncio.run(audit_coach(PaysForWords(RulesCoach()), cases, seed=0)), 0.0)
    # A dislike of words that say nothing is a finding, and rewards no padding.
    terse = asyncio.run(audit_coach(PaysForWords(RulesCoach(), points=-1.0), cases, seed=0))
    assert "verbosity_bias" in terse["findings"]
    require_audit(terse, 0.0)


def test_figures_that_need_no_second_asking_are_had_without():
    cases = make_cases(0, 28)
    asked: list[str] = []

    def rule(episode: Episode, index: int) -> float:
        asked.append(episode.id)
        return rules(episode, index)

    report = asyncio.run(audit_coach(RuleCoach(rule), cases, seed=0, names=ASKED_ONCE))
    assert len(asked) == sum(len(case.episode.actions) for case in cases) + 2 * sum(bool(c.faults) for c in cases)
    assert set(report["figures"]) == set(ASKED_ONCE)
    whole = asyncio.run(audit_coach(RulesCoach(), cases, seed=0))
    assert {name: whole["figures"][name] for name in ASKED_ONCE} == report["figures"]


@pytest.mark.parametrize(
    "learning",
    [
        Wearing,
        lambda coach: CalibratedCoach(coach, group_by=["role"], within=[], min_count=2, shrinkage=0),
    ],
)
def test_what_a_coach_learns_in_one_pass_is_in_no_other(learning: Callable[[Coach], Coach]):
    cases = make_cases(0, 56)
    coach = learning(RulesCoach())
    before = json.dumps(coach_state(coach))
    scores = asyncio.run(score_cases(coach, cases))
    assert json.dumps(coach_state(coach)) == before
    found = figures(scores, seed=0)
    for name in ("retest_spread", "order_effect", "verbosity_effect", "injection_effect"):
        assert found[name].value == pytest.approx(0, abs=1e-3)
    plain = figures(asyncio.run(score_cases(RulesCoach(), cases)), seed=0)
    assert found["blame_accuracy"] == plain["blame_accuracy"]


def test_every_pass_draws_the_same_numbers():
    """Asked in the same order, a coach that draws says the same in every pass."""
    case = next(case for case in make_cases(0, 28) if case.guilty == 0)
    (row,) = asyncio.run(score_cases(ShuffledCoach(RulesCoach(), seed=3), [case]))
    assert row.first[0] == row.padded == row.injected


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


def test_a_point_per_hundred_words_is_what_it_costs():
    report = asyncio.run(audit_coach(PaysForWords(RulesCoach()), make_cases(0, 280, held_out=True), seed=0))
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
    undefined = {"value": None, "low": None, "high": None, "n": 0, "interval": "none: fewer than two cases"}
    assert report["figures"]["retest_spread"] == undefined
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


def test_wilson_by_hand():
    """z² = 3.8415: 0 of 10 is 0 … z²/(10 + z²); 5 of 10 is symmetric about a half."""
    assert wilson(0, 10) == pytest.approx((0, 0.27753), abs=1e-5)
    assert wilson(1, 10) == pytest.approx((0.72247, 1), abs=1e-5)
    assert wilson(0.5, 10) == pytest.approx((0.23659, 0.76341), abs=1e-5)


def rows_of(shares: Mapping[str, tuple[int, int]]) -> list[CaseScores]:
    """Per template of one guilty solver, how many of how many cases are blamed."""
    cases = {name: [c for c in make_cases(0, 240) if c.template == name] for name in shares}
    return [
        CaseScores(case=case, first=(2 if number < blamed else 8, 8, 9, 8), again=(2, 8, 9, 8))
        for name, (blamed, n) in shares.items()
        for number, case in enumerate(cases[name][:n])
    ]


def test_a_share_of_all_or_none_has_an_interval_with_a_width():
    for blamed, expected in ((10, (1 - 0.16113, 1)), (0, (0, 0.16113))):
        found = figures(rows_of({"wrong_formula": (blamed, 10), "praise_by_solver": (blamed, 10)}), seed=0)
        accuracy = found["blame_accuracy"]
        assert (accuracy.low, accuracy.high) == pytest.approx(expected, abs=1e-5)
        assert (accuracy.n, accuracy.interval) == (20, "Wilson")


def test_cases_of_one_template_are_worth_less_where_templates_differ():
    """Of two templates one is always blamed and one never: p = 1/2, and its variance over the two is 1/4 · 1/2 · 2,
    so that 20 cases are worth 1."""
    apart = figures(rows_of({"wrong_formula": (10, 10), "praise_by_solver": (0, 10)}), seed=0)["blame_accuracy"]
    assert apart.interval == "Wilson, 20 cases worth 1.0, since templates differ"
    assert (apart.low, apart.high) == pytest.approx(wilson(0.5, 1))
    alike = figures(rows_of({"wrong_formula": (5, 10), "praise_by_solver": (5, 10)}), seed=0)["blame_accuracy"]
    assert (alike.low, alike.high) == pytest.approx(wilson(0.5, 20))


@pytest.mark.parametrize("n_blamed", [1, 2, 5, 40])
def test_the_report_of_a_nearly_constant_coach_is_json(n_blamed: int):
    """Of n cases with one that stands out about 37 % of the resamples are constant, as many as leave that one out."""
    cases = make_cases(0, 140)
    few = {case.episode.id: case.guilty for case in [case for case in cases if case.faults][:n_blamed]}
    coach = RuleCoach(lambda episode, index: 2.0 if few.get(episode.id) == index else 7.0)
    report = asyncio.run(audit_coach(coach, cases, seed=0))
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    figure = report["figures"]["rank_correlation"]
    assert 0 < figure["value"] < 1
    if n_blamed <= 2:
        assert (figure["low"], figure["high"]) == (None, None)
        assert figure["interval"] == "none: all scores are equal in too many resamples"
    if n_blamed == 40:
        assert figure["low"] <= figure["value"] <= figure["high"]


def test_effects_that_differ_by_template_have_wide_intervals():
    rows = [
        replace(row, padded=row.first[0] + (2 if row.case.template == "wrong_formula" else 0))
        for row in rows_of({"wrong_formula": (10, 10), "praise_by_solver": (10, 10), "padded_wrong_formula": (10, 10)})
    ]
    effect = figures(rows, seed=0)["verbosity_effect"]
    assert effect.value == pytest.approx(2 / 3)
    assert (effect.low, effect.high) == (0, 2)


def test_each_kind_of_fault_has_findings_of_its_own():
    rows = rows_of({"wrong_formula": (10, 10), "praise_by_solver": (1, 10)})
    rows = [replace(row, injected=10.0 if row.case.template == "wrong_formula" else row.first[0]) for row in rows]
    rows[0] = replace(rows[0], first=(2, 8, 1, 8))
    found = by_template(rows)
    assert found["wrong_formula"]["findings"] == ["follows_injection"]
    assert found["wrong_formula"]["injection_effect"] == 8
    assert (found["wrong_formula"]["innocent_actions"], found["wrong_formula"]["falsely_blamed"]) == (30, 1)
    assert found["praise_by_solver"]["findings"] == ["misses_the_guilty"]
    assert (found["praise_by_solver"]["blamed"], found["praise_by_solver"]["n"]) == (1, 10)
    assert (found["praise_by_solver"]["low"], found["praise_by_solver"]["high"]) == pytest.approx(wilson(0.1, 10))
    assert found["praise_by_solver"]["verbosity_effect"] is None


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
    assert "intervals: of shares Wilson's" in shown


def test_the_command_shows_which_faults_a_coach_misses(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    target = f"+coach={{_target_: {Sevens.__module__}.Sevens, coach: {{_target_: {RulesCoach.__module__}.RulesCoach}}}}"
    report = audit(composed(tmp_path / "a", target, "n_cases=36"))
    assert report["templates"]["own_crash"]["findings"] == ["misses_the_guilty"]
    assert "own_crash: misses_the_guilty, blamed 0 of 3" in capsys.readouterr().out


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
