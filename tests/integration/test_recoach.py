"""`mappa recoach` over a real run: another coach, another credit, and what it costs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from lightning_mappa.checks import check
from lightning_mappa.cli import of_run
from lightning_mappa.coaches.call_log import CallOutcome
from lightning_mappa.coaches.guard import LOG
from lightning_mappa.coaches.rules import RulesCoach
from lightning_mappa.config import structured
from lightning_mappa.errors import CoachError, ConfigError
from lightning_mappa.recoach.recoach import recoach
from lightning_mappa.types import Episode, Verdict
from tests.fake_messages_api import KEY, Answer, Call, FakeMessagesAPI, message, verdict
from tests.integration.conftest import run_fit, transcript_lines

AGENTS = ("solver", "executor", "verifier")


class OneMore:
    """The rules, a point kinder."""

    name = "one/more"

    async def score(self, episode: Episode, index: int) -> Verdict:
        given = await RulesCoach().score(episode, index)
        assert given.score is not None
        return Verdict(score=min(given.score + 1, 10), reason=given.reason, coach=self.name)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recoach") / "run"
    run_fit(folder, "trainer.max_steps=1", "datamodule.rollout_batch_size=8")
    return folder


def again(run: Path, *overrides: str) -> dict[str, Any]:
    given = [f"run={run}", *overrides]
    with initialize_config_module("lightning_mappa.conf", version_base="1.3"):
        cfg = structured(of_run(compose("recoach", overrides=given), given))
    check(cfg)
    return recoach(cfg)


def test_the_runs_own_coach_says_the_same_again(run, capsys):
    report = again(run, "recoach.rescore=true", "recoach.name=same")
    assert json.loads((run / "recoach-same.json").read_text()) == report
    assert report["coach"] == {"recorded": ["rules"], "new": "rules", "asked": True}
    assert set(report["agents"]) == set(AGENTS)
    recorded = transcript_lines(run)
    for agent, figures in report["agents"].items():
        actions = [line for line in recorded if line.get("agent_id") == agent]
        assert figures["verdicts"]["n"] == len(actions) > 0
        assert (figures["verdicts"]["mean_difference"], figures["verdicts"]["largest"]) == (0, [])
        assert figures["advantages"]["sign_flips"] == 0
        if figures["update"]["cosine"] is None:
            assert figures["update"]["reason"].endswith("verdicts is zero")
        else:
            assert figures["update"]["cosine"] == pytest.approx(1, abs=1e-5)
    assert any(figures["update"]["cosine"] is not None for figures in report["agents"].values())
    shown = capsys.readouterr().out
    assert "recoach-same.json" in shown
    with pytest.raises(ConfigError, match=r"recoach-same\.json is there already: give another recoach\.name"):
        again(run, "recoach.rescore=true", "recoach.name=same")


def test_another_coach_and_another_credit(run):
    target = f"coach={{_target_: {__name__}.OneMore}}"
    report = again(run, target, "recoach.update_steps=0")
    assert report["name"].startswith("one-more-")
    for figures in report["agents"].values():
        assert 0 < figures["verdicts"]["mean_difference"] <= 1
        assert figures["update"]["reason"] == "recoach.update_steps is 0"
    credit = again(run, "algorithm.return_scope=trajectory", "recoach.name=credit")
    assert credit["algorithm"] == {"return_scope": ["action", "trajectory"]}
    assert credit["coach"]["asked"] is False
    solver, verifier = (credit["agents"][agent] for agent in ("solver", "verifier"))
    assert solver["verdicts"]["mean_difference"] == 0
    assert solver["advantages"]["pearson"] < 0.999
    assert verifier["advantages"]["sign_flips"] == 0


def test_what_changes_nothing_or_has_no_transcripts_is_refused(run, tmp_path):
    with pytest.raises(ConfigError, match="nothing differs from run="):
        again(run)
    (tmp_path / "config.yaml").write_text((run / "config.yaml").read_text())
    with pytest.raises(ConfigError, match="holds no transcripts"):
        again(tmp_path, "recoach.rescore=true")


def test_each_side_has_a_loss_of_its_own(run):
    same = again(run, "recoach.rescore=true", "recoach.name=reference")
    loss = again(run, "algorithm.mini_batch_size=4", "algorithm.micro_batch_size=2", "recoach.name=loss")
    assert loss["algorithm"] == {"mini_batch_size": [8, 4]}
    assert loss["coach"]["asked"] is False
    moved = 0
    for agent, figures in loss["agents"].items():
        update, before = figures["update"], same["agents"][agent]["update"]
        if update["cosine"] is not None:
            assert update["norm_recorded"] == pytest.approx(before["norm_recorded"], rel=1e-4)
            assert update["norm_new"] > 1.2 * update["norm_recorded"]
            moved += 1
    assert moved


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ["algorithm.clip_ratio_low=0.1"],
            r"algorithm\.clip_ratio_low=0\.1 changes nothing in mappa recoach \(weights",
        ),
        (["algorithm.dual_clip=3"], r"algorithm\.dual_clip=3\.0 changes nothing"),
        (["algorithm.max_skipped_steps=9"], r"algorithm\.max_skipped_steps=9 changes nothing .*\(no step is taken\)"),
        (["algorithm.loss_agg_mode=seq-mean-token-mean", "recoach.update_steps=0"], "recoach.update_steps is 0"),
        (["datamodule.temperature=0.5", "recoach.rescore=true"], r"datamodule\.temperature=0\.5 changes nothing"),
        (
            ["trainer.max_steps=7", "coach=shuffled"],
            r"trainer\.max_steps=7 changes nothing in mappa recoach \(recorded",
        ),
        (["algorithm.micro_batch_size=2"], "nothing differs from run="),
        (["coach.min_audit=0.5"], "nothing differs from run="),
        (["+algorithm.return_scop=agent"], r"algorithm\.return_scop is no known key"),
        (["algorithm.reward=best"], r"algorithm\.reward is 'best'; allowed: process, outcome, mix"),
    ],
)
def test_overrides_that_are_unknown_or_without_effect_are_refused(run, overrides, sentence):
    before = sorted(run.glob("recoach-*"))
    with pytest.raises(ConfigError, match=sentence):
        again(run, *overrides)
    assert sorted(run.glob("recoach-*")) == before


def test_another_coach_is_asked_where_the_runs_own_cannot_be_imported_any_more(run, tmp_path):
    (tmp_path / "transcripts").mkdir()
    for file in (run / "transcripts").glob("step-*"):
        (tmp_path / "transcripts" / file.name).write_bytes(file.read_bytes())
    cfg = OmegaConf.load(run / "config.yaml")
    OmegaConf.update(cfg, "coach._target_", "gone_package_here.Own")
    OmegaConf.save(cfg, tmp_path / "config.yaml")
    report = again(tmp_path, "coach=rules", "recoach.update_steps=0")
    assert report["coach"]["asked"] is True
    assert report["agents"]["solver"]["verdicts"]["mean_difference"] == 0
    with pytest.raises(ConfigError, match="there is no module gone_package_here"):
        again(tmp_path, "recoach.rescore=true")


def test_weights_that_are_gone_leave_the_rest(run, tmp_path):
    moved = tmp_path / "moved"
    (moved / "transcripts").mkdir(parents=True)
    for file in (run / "transcripts").glob("step-*"):
        (moved / "transcripts" / file.name).write_bytes(file.read_bytes())
    cfg = OmegaConf.load(run / "config.yaml")
    for agent in AGENTS:
        OmegaConf.update(cfg, f"agents.{agent}.model.path", f"{tmp_path}/nothing")
    OmegaConf.save(cfg, moved / "config.yaml")
    report = again(moved, "recoach.rescore=true")
    assert report["agents"]["solver"]["update"]["cosine"] is None
    assert "cannot be loaded" in report["agents"]["solver"]["update"]["reason"]
    assert report["agents"]["solver"]["verdicts"]["n"] > 0


def score(call: Call) -> Answer:
    return message(verdict(call, int(call.case, 16) % 11))


def test_a_coach_that_is_paid_for_has_a_log_of_its_own_and_pays_once(run, monkeypatch):
    monkeypatch.setenv("ANTHROPIC_API_KEY", KEY)
    with FakeMessagesAPI(score) as api:
        options = ("coach=anthropic", f"coach.provider.base_url={api.url}")
        with pytest.raises(CoachError, match="has made the 10 calls of budget_calls"):
            again(run, *options, "coach.guard.budget_calls=10", "coach.max_concurrency=4")
        assert len(api.calls) == 10
        (started,) = (path for path in run.glob("recoach-claude-*") if path.is_dir())
        assert not started.with_suffix(".json").exists()
        report = again(run, *options)  # another cap is no other coach: it goes on with what was paid for
        asked = sum(figures["verdicts"]["actions"] for figures in report["agents"].values())
        assert len(api.calls) == asked == report["accounts"]["calls"]
    assert report["accounts"]["logged"] == 10
    assert report["accounts"]["usd"] > 0
    outcomes = [json.loads(line)["outcome"] for line in (started / LOG).read_text().splitlines()]
    assert outcomes.count(CallOutcome.PAID) == asked
    assert not (run / LOG).exists()


def test_an_outage_leaves_no_report_and_a_second_attempt_goes_on_with_what_was_paid(run, monkeypatch):
    monkeypatch.setenv("ANTHROPIC_API_KEY", KEY)
    replies = 10

    def answer(call: Call) -> Answer:
        nonlocal replies
        replies -= 1
        return score(call) if replies >= 0 else Answer(status=529, body={"type": "error"})

    with FakeMessagesAPI(answer) as api:
        options = ("coach=anthropic", f"coach.provider.base_url={api.url}", "coach.max_attempts=1")
        options += ("recoach.name=outage", "recoach.update_steps=0", "coach.max_concurrency=2")
        with pytest.raises(CoachError, match=r"^recoach has not ended, after \d+ calls: 7 of the last "):
            again(run, *options)
        assert not (run / "recoach-outage.json").exists()
        replies = 1000
        report = again(run, *options)
    asked = sum(figures["verdicts"]["actions"] for figures in report["agents"].values())
    assert 1000 - replies == asked - 10
    outcomes = [json.loads(line)["outcome"] for line in (run / "recoach-outage" / LOG).read_text().splitlines()]
    assert outcomes.count(CallOutcome.PAID) == asked
