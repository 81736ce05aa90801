"""`mappa fit` with a coach that is paid for: killed, over budget, and again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_mappa.coaches.guard import LOG
from lightning_mappa.config import structured
from lightning_mappa.errors import CoachError, ExitCode
from lightning_mappa.fit import fit
from lightning_mappa.run_folder import RunFolder
from tests.fake_messages_api import KEY, Answer, Call, FakeMessagesAPI, message, verdict
from tests.integration.conftest import run_fit, transcript_lines

IN_FLIGHT = 4
OPTIONS = ("coach=anthropic", f"coach.max_concurrency={IN_FLIGHT}", "trainer.checkpoint_every=10")


def score(call: Call) -> Answer:
    """The same for the same case, whoever asks and when."""
    return Answer(
        body=message(verdict(call, int(call.case, 16) % 11)).body, headers={"request-id": "req_1"}, delay_s=0.03
    )


@pytest.fixture
def api() -> Iterator[FakeMessagesAPI]:
    with FakeMessagesAPI(score) as api:
        yield api


def outcomes(run: Path) -> Counter[str]:
    """Of the calls in the log, without a line that a kill has torn."""
    lines = (run / LOG).read_text().splitlines(keepends=True)
    return Counter(json.loads(line)["outcome"] for line in lines if line.endswith("\n"))


def resume(run: Path) -> dict[str, Any]:
    cfg = RunFolder.open(run).config()
    cfg.resume = str(run)
    return fit(structured(cfg))


@pytest.mark.slow
def test_over_budget_then_killed_then_done_without_paying_twice(tmp_path, api, monkeypatch):
    monkeypatch.setenv("ANTHROPIC_API_KEY", KEY)
    run = tmp_path / "run"
    # 1. The cap on calls ends the run in its first step; what was paid is in the log.
    with pytest.raises(CoachError, match="has made the 10 calls of budget_calls; go on with a larger one"):
        run_fit(run, *OPTIONS, f"coach.provider.base_url={api.url}", "coach.guard.budget_calls=10")
    assert len(api.calls) == 10
    assert outcomes(run) == {"sent": 10, "paid": 10}
    summary = json.loads((run / "summary.json").read_text())
    assert summary["status"].startswith("CoachError")
    assert summary["coach"]["calls"] == 10

    # 2. With a higher cap it goes on, and is killed in the middle of the second step's calls.
    command = [sys.executable, "-m", "lightning_mappa", "fit", f"resume={run}", "+coach.guard.budget_calls=null"]
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
    while not (run / "metrics.jsonl").exists() or api.in_flight < 2:
        assert process.poll() is None
        time.sleep(0.001)
    process.kill()
    process.wait()
    time.sleep(0.2)
    in_flight = outcomes(run)["sent"] - outcomes(run)["paid"]
    assert 0 < in_flight <= IN_FLIGHT
    assert len(api.calls) <= outcomes(run)["sent"] <= len(api.calls) + IN_FLIGHT

    # 3. Resumed, it pays again at most for what was in flight, and its books have all that was paid.
    summary = resume(run)
    actions = len(transcript_lines(run))
    assert actions <= len(api.calls) <= actions + IN_FLIGHT
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    first, last = (line["coach"] for line in lines)
    assert first["forecast_usd"] == pytest.approx(2 * first["usd"])
    assert last["forecast_calls"] == last["calls"]
    assert len(api.calls) <= summary["coach"]["calls"] == actions + in_flight
    assert summary["coach"]["calls_lost_in_flight"] == in_flight
    assert summary["coach"]["logged"] >= 10
    # 1110 tokens in, 1000 of them read from the cache and 10 written to it, 20 out.
    lost_usd = summary["coach"]["usd_lost_in_flight"]
    assert lost_usd > in_flight * 31.25e-6
    assert summary["coach"]["usd"] == pytest.approx(actions * 31.25e-6 + lost_usd)

    # 4. The key is nowhere.
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or KEY.encode() not in path.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("runtime.max_staleness=1", "algorithm.rollout_correction=2")])
def test_a_run_that_is_told_to_stop_sums_up_what_calls_in_flight_have_cost(tmp_path, monkeypatch, more):
    monkeypatch.setenv("ANTHROPIC_API_KEY", KEY)
    run = tmp_path / "run"
    with FakeMessagesAPI(lambda call: replace(score(call), delay_s=2.0)) as api:
        with pytest.raises(CoachError):  # leaves a folder to go on with
            run_fit(run, *OPTIONS, *more, f"coach.provider.base_url={api.url}", "coach.guard.budget_calls=0")
        command = [sys.executable, "-m", "lightning_mappa", "fit", f"resume={run}", "+coach.guard.budget_calls=null"]
        process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
        while api.in_flight < 2:
            assert process.poll() is None
            time.sleep(0.001)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == ExitCode.PREEMPTED
        given = outcomes(run)
        assert given["paid"] == len(api.calls) >= 2
    summary = json.loads((run / "summary.json").read_text())
    assert summary["status"] == "preempted"
    assert summary["coach"]["usd"] == pytest.approx(given["paid"] * 31.25e-6)
    assert (summary["coach"]["usd_in_flight"], summary["coach"]["usd_unsettled"]) == (0.0, 0.0)
