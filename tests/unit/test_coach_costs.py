"""What a run says of its coach's costs, so far and in the end."""

from __future__ import annotations

import asyncio
import json
import threading
import time

import pytest

from lightning_mappa.coaches.base import accounts, bind_accounts
from lightning_mappa.coaches.guard import BudgetGuard
from lightning_mappa.coaches.llm import LLMCoach
from lightning_mappa.coaches.rules import RulesCoach
from lightning_mappa.coaches.shuffled import ShuffledCoach
from lightning_mappa.fit import _sum_up
from lightning_mappa.progress import RunProgress, step_text
from lightning_mappa.record import RunRecord
from lightning_mappa.run_folder import RunFolder
from lightning_mappa.testing import ScriptedCoach
from tests.unit.coaches.calls import PRICES
from tests.unit.coaches.conftest import make_episode
from tests.unit.coaches.test_halt import Slow

LINE = {"success": 0.5, "score": {"a": 6.0}, "agents": {}, "episodes": 8, "timing_s": {"rollout": 4.0}}


class PaidCoach(ScriptedCoach):
    def __init__(self, **figures):
        super().__init__(lambda episode, index: 5.0)
        self.figures = figures

    def bind(self, folder):
        self.folder = folder

    def summary(self):
        return self.figures


def record_of(folder, coach):
    progress = RunProgress(40, enabled=False)
    return RunRecord(RunFolder(folder), ["a"], progress, max_steps=40, coach=coach, isolation={})


def summary(folder, coach, *, closed):
    record = record_of(folder, coach)
    record.closed = set(range(closed))
    record.write_summary(status="done", selected_version=None)
    return json.loads((folder / "summary.json").read_text())


@pytest.mark.parametrize(
    ("closed", "figures"),
    [
        (0, {"calls": 90, "usd": 0.25}),
        (1, {"calls": 90, "usd": 0.25, "forecast_calls": 3600.0, "forecast_usd": 10.0}),
        (40, {"calls": 90, "usd": 0.25, "forecast_calls": 90.0, "forecast_usd": 0.25}),
    ],
)
def test_the_forecast_comes_with_the_first_step(tmp_path, closed, figures):
    assert summary(tmp_path, PaidCoach(calls=90, usd=0.25), closed=closed)["coach"] == figures


def test_the_summary_of_a_run_that_ends_has_what_calls_in_flight_have_cost(tmp_path):
    """It is there before they have ended, with what they may cost, and again when they have."""
    guard = BudgetGuard(model="m", prices={"m": PRICES}, budget_usd=1)
    coach = LLMCoach(Slow(takes_s=0.6), guard=guard)
    coach.bind(tmp_path)
    asking = [threading.Thread(target=lambda i=i: _score(coach, f"e{i}"), daemon=True) for i in range(2)]
    for thread in asking:
        thread.start()
    while coach.counts["attempts"] < 2:
        time.sleep(0.01)
    written = []
    record = record_of(tmp_path, coach)
    write = record.write_summary
    record.write_summary = lambda **told: written.append(write(**told)) or written[-1]
    given = _sum_up(record, coach, status="preempted", selected_version=None)
    coach.close()
    before, after = (summary["coach"] for summary in written)
    assert (before["usd"], after["usd"]) == (0.0, 0.003)
    assert before["usd_in_flight"] >= 0.001
    assert after["usd_in_flight"] == after["usd_unsettled"] == 0.0
    assert json.loads((tmp_path / "summary.json").read_text()) == given == written[-1]


def test_a_coach_that_cannot_be_halted_in_time_holds_no_summary_back(tmp_path, monkeypatch):
    class Stuck(PaidCoach):
        async def halt(self, reason):
            await asyncio.sleep(60)

    monkeypatch.setattr("lightning_mappa.fit._SETTLE_S", 0.1)
    with pytest.warns(UserWarning, match="calls of the coach may be missing in the summary: TimeoutError"):
        _sum_up(record_of(tmp_path, Stuck(calls=3)), Stuck(calls=3), status="RankLost: gone", selected_version=None)
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "RankLost: gone"


def _score(coach, episode_id):
    asyncio.run(coach.score(make_episode(episode_id=episode_id), 0))


def test_dollars_that_are_not_known_are_not_forecast(tmp_path):
    figures = summary(tmp_path, PaidCoach(calls=3, usd=None), closed=1)["coach"]
    assert figures == {"calls": 3, "usd": None, "forecast_calls": 120.0}


@pytest.mark.parametrize("coach", [RulesCoach(), ShuffledCoach(RulesCoach())])
def test_a_coach_that_costs_nothing_is_not_mentioned(tmp_path, coach):
    assert "coach" not in summary(tmp_path, coach, closed=1)


def test_a_coach_around_another_hands_its_accounts_on(tmp_path):
    inner = PaidCoach(calls=1)
    outer = ShuffledCoach(inner)
    bind_accounts(outer, tmp_path)
    assert inner.folder == tmp_path
    assert accounts(outer) == {"calls": 1}


@pytest.mark.parametrize(
    ("costs", "text"),
    [
        ({}, "2.0 episodes/s"),
        ({"calls": 3, "usd": 0.254, "forecast_usd": 10.16, "forecast_calls": 120.0}, "coach $0.25 of about $10.16"),
        ({"calls": 3, "usd": None, "forecast_calls": 120.0}, "coach 3 calls of about 120"),
    ],
)
def test_the_progress_line_ends_with_the_costs(costs, text):
    assert step_text({**LINE, "coach": costs} if costs else LINE).endswith(text)


def test_evaluations_are_forecast_by_their_number(tmp_path):
    """10 calls an evaluation, of which there will be 9, and 5 a step, of which there will be 40."""
    coach = PaidCoach(calls=0, usd=None)
    progress = RunProgress(40, enabled=False)
    record = RunRecord(RunFolder(tmp_path), ["a"], progress, max_steps=40, evaluations=9, coach=coach, isolation={})
    for version in range(2):
        with record.evaluating():
            coach.figures = {**coach.figures, "calls": coach.figures["calls"] + 10}
        record.evaluation(version, [], {"n": 0.0})
        coach.figures = {**coach.figures, "calls": coach.figures["calls"] + 5 * (1 - version)}
    record.closed = {0}
    assert record.state()["evaluation_costs"] == {"calls": 20}
    assert record.write_summary(status="done", selected_version=None)["coach"]["forecast_calls"] == 9 * 10 + 40 * 5
