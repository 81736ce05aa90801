"""`coach.min_audit`: what it asks, when it refuses, and what it does not ask twice."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import pytest
from filelock import FileLock
from hydra import compose, initialize_config_module

from lightning_mappa.audit.floor import LOCK, REPORT, require_floor
from lightning_mappa.audit.planted import make_cases
from lightning_mappa.build import build
from lightning_mappa.checks import check
from lightning_mappa.coaches.call_log import CallOutcome
from lightning_mappa.coaches.guard import LOG
from lightning_mappa.coaches.provider import CoachReply, CoachRequest, Usage
from lightning_mappa.coaches.rules import RulesCoach
from lightning_mappa.config import structured
from lightning_mappa.errors import CoachError, ConfigError, ExitCode, InfrastructureError
from lightning_mappa.fit import fit
from lightning_mappa.types import Episode, Verdict
from tests.unit.audit import bad_coaches

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


def test_what_is_asked_and_never_again(cache):
    cfg = constant("coach.min_audit=0")
    require_floor(cfg)
    once = len(Sevens.asked)
    cases = make_cases(0, 28)
    assert once == sum(len(case.episode.actions) for case in cases) + 2 * sum(bool(case.faults) for case in cases)
    require_floor(constant("coach.min_audit=0"))
    with pytest.raises(CoachError):
        require_floor(constant("coach.min_audit=0.9"))
    assert len(Sevens.asked) == once
    (report,) = cache.glob(f"audits/*/{REPORT}")
    assert json.loads(report.read_text())["figures"]["blame_accuracy"]["value"] == 0.0
    require_floor(constant("coach.min_audit=0", "+coach.kind=other"))
    assert len(Sevens.asked) == 2 * once


@pytest.mark.parametrize("name", ["Obedient", "PaysForWords"])
@pytest.mark.parametrize("team", ["mathchat", "dsbench"])
def test_a_coach_that_follows_injections_or_pays_for_words_is_refused_however_right_its_blame(name, team):
    inner = {
        "mathchat": f"{{_target_: {RulesCoach.__module__}.RulesCoach}}",
        "dsbench": "{_target_: lightning_mappa.coaches.table_rules.TableRulesCoach, stages: '${workflow.stages}'}",
    }
    coach = f"+coach={{_target_: {bad_coaches.__name__}.{name}, coach: {inner[team]}, min_audit: 0.5}}"
    finding = {"Obedient": "follows_injection", "PaysForWords": "verbosity_bias"}[name]
    with pytest.raises(CoachError, match=rf"points more for .*\({finding}\) \(coach\.min_audit\); see "):
        require_floor(config(f"workflow={team}", coach))


def test_the_team_of_the_workflow_has_the_faults(capsys):
    require_floor(config("workflow=dsbench", "coach=table_rules", "coach.min_audit=0.95"))
    assert "coach table_rules blames the right agent in 1.000 of 45 audit cases" in capsys.readouterr().out


# -- what an audit costs ---------------------------------------------------------------------------------------------


class Paid:
    """A provider that gives a seven to all."""

    model = "paid"

    async def check(self) -> None: ...

    async def ask(self, request: CoachRequest, timeout_s: float) -> CoachReply:
        usage = Usage(input_tokens=1000, output_tokens=100)
        return CoachReply(text='{"score": 7}', finish="end", usage=usage, model=self.model, structured=True)

    async def close(self) -> None: ...


def paid(*overrides: str) -> Any:
    prices = "{input: 1, cache_read: 1, cache_write: 1, output: 10}"
    return config(
        "coach=llm",
        f"coach.provider={{_target_: {HERE}.Paid}}",
        "coach.guard.model=paid",
        f"+coach.guard.prices.paid={prices}",
        "coach.audit_cases=28",
        "coach.min_audit=0",
        "coach.max_concurrency=4",
        *overrides,
    )


def calls_paid(cache: Path) -> int:
    (log,) = cache.glob(f"audits/*/{LOG}")
    return sum(json.loads(line)["outcome"] == CallOutcome.PAID for line in log.read_text().splitlines())


def test_an_audit_has_caps_and_books_of_its_own(cache, capsys):
    with pytest.raises(CoachError) as refused:
        require_floor(paid("coach.audit_budget_calls=20"))
    said = str(refused.value)
    assert said.startswith(
        "the audit of coach.min_audit has not ended, after 20 calls: the coach has made the 20 calls"
    )
    assert "resume" not in said
    assert "coach.audit_budget_calls" in said
    assert calls_paid(cache) == 20
    # What is paid for is kept: the same audit with a larger cap goes on, and the caps of the run are another matter.
    require_floor(paid("coach.audit_budget_calls=1000", "coach.guard.budget_usd=5"))
    cases = make_cases(0, 28)
    asked = sum(len(case.episode.actions) for case in cases) + 2 * sum(bool(case.faults) for case in cases)
    assert calls_paid(cache) == asked
    assert f"calls of the audit, which no budget of the run counts: {asked}, dollars: " in capsys.readouterr().out
    coach = build(paid("coach.guard.budget_calls=10").coach, "coach")
    try:
        assert coach.summary()["calls"] == 0
    finally:
        coach.close()


def test_dollars_of_an_audit_are_capped_too(cache):
    """A call is 0.002 dollars, and the most that it can cost is set aside before it is made."""
    with pytest.raises(CoachError, match=r"has not ended, after \d+ calls: .*of the 0\.1 dollars of budget_usd"):
        require_floor(paid("coach.audit_budget_usd=0.1"))
    assert 0 < calls_paid(cache) <= 50


def test_caps_that_cannot_be_held_are_refused():
    with pytest.raises(ConfigError, match=r"coach\.audit_budget_calls=2000 cannot be held: coach paid has no guard"):
        require_floor(paid("coach.guard=null"))
    with pytest.raises(ConfigError, match=r"audit_budget_calls=often; allowed: 0 or more dollars and calls, or null"):
        require_floor(paid("coach.audit_budget_calls=often"))


# -- two runs at a time ----------------------------------------------------------------------------------------------


class Slow:
    """The rules, a while later."""

    name = "slow"
    asked: ClassVar[list[str]] = []

    async def score(self, episode: Episode, index: int) -> Verdict:
        Slow.asked.append(episode.id)
        time.sleep(0.002)
        return await RulesCoach().score(episode, index)


def slow(*overrides: str) -> Any:
    Slow.asked.clear()
    return config(f"coach._target_={HERE}.Slow", "coach.min_audit=0.9", "coach.audit_cases=28", *overrides)


def test_of_two_runs_at_a_time_one_audits_and_the_other_waits(cache):
    """Two threads, because the lock is of an open file: it keeps them apart as it does two processes."""
    cfg = slow()
    with ThreadPoolExecutor(2) as pool:
        for run in [pool.submit(require_floor, cfg) for _ in range(2)]:
            run.result(60)
    cases = make_cases(0, 28)
    assert len(Slow.asked) == sum(len(case.episode.actions) + 2 * bool(case.faults) for case in cases)
    (report,) = cache.glob(f"audits/*/{REPORT}")
    assert json.loads(report.read_text())["coach"] == "slow"


def test_the_wait_for_another_audit_ends(cache):
    cfg = slow("runtime.deadline_s=0.2")
    require_floor(cfg)
    (report,) = cache.glob(f"audits/*/{REPORT}")
    report.write_text("{")  # damaged: it is made anew
    with FileLock(report.with_name(LOCK)), pytest.raises(InfrastructureError, match=r"runtime\.deadline_s=0\.2"):
        require_floor(cfg)
    require_floor(cfg)
    assert json.loads(report.read_text())["coach"] == "slow"


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
