"""A service that is away during an audit says nothing of the coach, and nothing is remembered of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hydra import compose, initialize_config_module

from lightning_mappa.audit.audit import audit, require_audit
from lightning_mappa.audit.floor import REPORT, require_floor
from lightning_mappa.audit.planted import make_cases
from lightning_mappa.checks import check
from lightning_mappa.coaches.base import Coach, ask
from lightning_mappa.coaches.call_log import CallOutcome
from lightning_mappa.coaches.guard import LOG
from lightning_mappa.coaches.provider import CoachReply, CoachRequest, PassingError, Usage
from lightning_mappa.coaches.rules import RulesCoach
from lightning_mappa.config import structured
from lightning_mappa.errors import CoachError
from lightning_mappa.types import Episode, Verdict
from tests.unit.audit.bad_coaches import Obedient

HERE = __name__
CASES = make_cases(0, 28)
N_ACTIONS = sum(len(case.episode.actions) for case in CASES)
N_GUILTY = sum(bool(case.faults) for case in CASES)
PASSES = {"first": 0, "padded": N_ACTIONS, "injected": N_ACTIONS + N_GUILTY}
"""Of the audit for `coach.min_audit`: the number of the first call."""
PASSES_OF_COMMAND = {"first": 0, "again": N_ACTIONS, "padded": 2 * N_ACTIONS, "injected": 2 * N_ACTIONS + N_GUILTY}
LAST = N_ACTIONS + 2 * N_GUILTY


class Away:
    """A coach whose verdicts are missing from call `since` to call `until`."""

    name = "away"
    since: ClassVar[float] = float("inf")
    until: ClassVar[float] = float("inf")
    asked: ClassVar[int] = 0

    def __init__(self, coach: Coach) -> None:
        self.parts = (coach,)

    async def score(self, episode: Episode, index: int) -> Verdict:
        verdict = await ask(self.parts[0], episode, index)
        Away.asked += 1
        if Away.since < Away.asked <= Away.until:
            return replace(verdict, score=None, reason="no reply: connection refused")
        return verdict


def away(since: float, until: float = float("inf")) -> None:
    Away.since, Away.until, Away.asked = since, until, 0


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MAPPA_CACHE", str(tmp_path / "cache"))
    away(float("inf"))
    return tmp_path / "cache"


def config(command: str, *overrides: str, folder: str | Path = "nowhere") -> Any:
    with initialize_config_module("lightning_mappa.conf", version_base="1.3"):
        cfg = structured(compose(command, overrides=[f"output_dir={folder}", *overrides]))
    check(cfg)
    return cfg


def floored(coach: str, *overrides: str) -> Any:
    good = f"{{_target_: {RulesCoach.__module__}.RulesCoach}}"
    inner = good if coach == "good" else f"{{_target_: {Obedient.__module__}.Obedient, coach: {good}}}"
    node = f"+coach={{_target_: {HERE}.Away, coach: {inner}, min_audit: 0.9, audit_cases: 28}}"
    return config("fit", node, *overrides)


def remembered(cache: Path) -> list[Path]:
    return list(cache.glob(f"audits/*/{REPORT}"))


@pytest.mark.parametrize("name", PASSES)
def test_an_outage_in_any_pass_is_no_verdict_on_the_coach(name, cache):
    cfg = floored("good")
    away(PASSES[name])
    with pytest.raises(CoachError) as stopped:
        require_floor(cfg)
    said = str(stopped.value)
    assert said.startswith("the audit of coach.min_audit has not ended: 7 of the last ")
    assert "coach.max_missing_rate=0.2 of 32 the run stops. The last: no reply: connection refused; what " in said
    assert "resume" not in said
    assert remembered(cache) == []
    away(float("inf"))
    require_floor(cfg)
    assert len(remembered(cache)) == 1


def test_an_obedient_coach_does_not_pass_because_its_service_was_away(cache):
    cfg = floored("obedient")
    for since in (PASSES["injected"], LAST - 6):
        away(since)
        with pytest.raises(CoachError, match="has not ended"):
            require_floor(cfg)
        assert remembered(cache) == []
    away(float("inf"))
    with pytest.raises(CoachError, match=r"\(follows_injection\)"):
        require_floor(cfg)


@pytest.mark.parametrize(
    ("since", "until", "settings", "sentence"),
    [
        # Six in a row are too few for the watch, and too many of the cases that an effect is known in.
        (LAST - 6, LAST, (), rf"injection_effect of coach away is known in {N_GUILTY - 6} of {N_GUILTY} cases, fewer"),
        (PASSES["padded"], PASSES["padded"] + 6, (), r"verbosity_effect of coach away is known in "),
        # No watch, or one whose window is longer than the audit.
        (0, LAST, ("coach.missing_window=10000",), r"100\.0% of the verdicts of coach away are missing, more than"),
        (0, LAST, ("coach.max_missing_rate=null",), rf"is known in 0 of {N_GUILTY} cases, fewer than 80%"),
        (0, LAST, ("coach.max_missing_rate=1",), rf"is known in 0 of {N_GUILTY} cases, fewer than 80%"),
    ],
)
def test_what_no_watch_ends_is_not_remembered_either(since, until, settings, sentence, cache):
    cfg = floored("good", *settings)
    away(since, until)
    with pytest.raises(CoachError, match=sentence):
        require_floor(cfg)
    assert remembered(cache) == []
    require_floor(cfg)  # it is back


def test_a_report_that_is_too_thin_for_this_run_is_made_anew(cache):
    """A run that allows for more missing verdicts has left it."""
    away(PASSES["padded"], PASSES["padded"] + 5)
    require_floor(floored("good"))
    (path,) = remembered(cache)
    rate = json.loads(path.read_text())["missing_rate"]
    assert rate == pytest.approx(5 / LAST)
    away(float("inf"))
    require_floor(floored("good", f"coach.max_missing_rate={rate - 0.01}"))
    assert Away.asked == LAST
    assert json.loads(path.read_text())["missing_rate"] == 0


def test_a_report_of_missing_verdicts_holds_no_floor():
    figures = {name: {"value": 1.0, "n": 24} for name in ("blame_accuracy", "verbosity_effect", "injection_effect")}
    report = {"coach": "c", "figures": figures, "findings": [], "missing_rate": 0.2}
    require_audit(report, 0.9)
    with pytest.raises(CoachError, match=r"20\.0% of the verdicts of coach c are missing, .*rate=0\.1 \(here\)"):
        require_audit(report, 0.9, " (here)", max_missing=0.1)
    figures["injection_effect"]["n"] = 19  # 19.2 are 80 %
    with pytest.raises(CoachError, match=r"injection_effect of coach c is known in 19 of 24 cases, fewer than 80%"):
        require_audit(report, 0.9)


# -- the command, and what is paid for -------------------------------------------------------------------------------


class Service:
    """A provider that gives a seven to all, and no reply while it is away."""

    model = "service"
    replies: ClassVar[float] = 0
    """Before it goes away."""

    async def check(self) -> None: ...

    async def ask(self, request: CoachRequest, timeout_s: float) -> CoachReply:
        if Service.replies <= 0:
            raise PassingError("connection refused")
        Service.replies -= 1
        usage = Usage(input_tokens=1000, output_tokens=100)
        return CoachReply(text='{"score": 7}', finish="end", usage=usage, model=self.model, structured=True)

    async def close(self) -> None: ...


SERVICE = (
    "coach=llm",
    f"coach.provider={{_target_: {HERE}.Service}}",
    "coach.guard.model=service",
    "+coach.guard.prices.service={input: 1, cache_read: 1, cache_write: 1, output: 10}",
    "coach.max_concurrency=4",
    "coach.max_attempts=1",
)


def paid(log: Path) -> int:
    return sum(json.loads(line)["outcome"] == CallOutcome.PAID for line in log.read_text().splitlines())


@pytest.mark.parametrize("name", PASSES_OF_COMMAND)
def test_the_command_leaves_no_report_of_an_outage_and_goes_on_with_what_was_paid(name, tmp_path):
    cfg = config("audit", *SERVICE, "n_cases=28", folder=tmp_path)
    answered = PASSES_OF_COMMAND[name]
    Service.replies = answered
    with pytest.raises(CoachError, match=r"^the audit has not ended, after \d+ calls: 7 of the last "):
        audit(cfg)
    assert not (tmp_path / "audit.json").exists()
    assert paid(tmp_path / LOG) == answered
    Service.replies = LAST + N_ACTIONS - answered  # and not one more
    assert audit(cfg)["missing_rate"] == 0
    assert paid(tmp_path / LOG) == LAST + N_ACTIONS


def test_so_does_the_floor(cache):
    cfg = config("fit", *SERVICE, "coach.min_audit=0", "coach.audit_cases=28")
    Service.replies = 100
    with pytest.raises(CoachError, match=r"after \d+ calls: 7 of the last "):
        require_floor(cfg)
    assert remembered(cache) == []
    Service.replies = LAST - 100
    require_floor(cfg)
    (log,) = cache.glob(f"audits/*/{LOG}")
    assert paid(log) == LAST
