"""What a run says of its coach's costs, so far and in the end."""

from __future__ import annotations

import json

import pytest

from lightning_mappa.coaches.base import accounts, bind_accounts
from lightning_mappa.coaches.rules import RulesCoach
from lightning_mappa.coaches.shuffled import ShuffledCoach
from lightning_mappa.progress import RunProgress, step_text
from lightning_mappa.record import RunRecord
from lightning_mappa.run_folder import RunFolder
from lightning_mappa.testing import ScriptedCoach

LINE = {"success": 0.5, "score": {"a": 6.0}, "agents": {}, "episodes": 8, "timing_s": {"rollout": 4.0}}


class PaidCoach(ScriptedCoach):
    def __init__(self, **figures):
        super().__init__(lambda episode, index: 5.0)
        self.figures = figures

    def bind(self, folder):
        self.folder = folder

    def summary(self):
        return self.figures


def summary(folder, coach, *, closed):
    record = RunRecord(
        RunFolder(folder), ["a"], RunProgress(40, enabled=False), max_steps=40, coach=coach, isolation={}
    )
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
