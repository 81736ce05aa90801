"""A run whose coach is a service: the real SDK against a server on loopback."""

from __future__ import annotations

import json

import pytest

from lightning_mappa.config import structured
from lightning_mappa.errors import CoachError, ConfigError
from lightning_mappa.fit import fit
from lightning_mappa.run_folder import RunFolder
from tests.fake_messages_api import KEY, Answer, Call, FakeMessagesAPI, message, verdict
from tests.integration.conftest import run_fit, transcript_lines

REFUSAL = {"type": "refusal", "category": "frontier_llm", "explanation": None}


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANTHROPIC_API_KEY", KEY)


def every_fifth_refused(call: Call) -> Answer:
    if int(call.case, 16) % 5 == 0:  # by what is asked, not by when
        return message(None, stop_reason="refusal", stop_details=REFUSAL)
    return message(verdict(call, int(call.case, 16) % 11, "by its token"))


def fit_with(api: FakeMessagesAPI, folder, *overrides: str):
    return run_fit(folder, "coach=anthropic", f"coach.provider.base_url={api.url}", *overrides)


@pytest.fixture(scope="module")
def scored(tmp_path_factory):
    folder = tmp_path_factory.mktemp("service") / "run"
    with pytest.MonkeyPatch.context() as patch, FakeMessagesAPI(every_fifth_refused) as api:
        patch.setenv("ANTHROPIC_API_KEY", KEY)
        summary = fit_with(api, folder, "coach.max_missing_rate=1")
        return folder, summary, list(api.calls)


def test_every_action_is_asked_about_once_and_gets_what_was_replied(scored):
    folder, _, calls = scored
    lines = transcript_lines(folder)
    verdicts = [line["verdict"] for line in lines]
    refused = [v for v in verdicts if v["reason"] == "the coach refused (frontier_llm)"]
    assert len(calls) == len(lines)
    assert 0 < len(refused) < len(verdicts) / 2
    assert all(v["score"] is None for v in refused)
    assert len(refused) == sum(int(call.case, 16) % 5 == 0 for call in calls)
    given = sorted(v["score"] for v in verdicts if v["score"] is not None)
    assert given == sorted(int(c.case, 16) % 11 for c in calls if int(c.case, 16) % 5)
    assert all(v["coach"] == "claude-haiku-5-5" for v in verdicts)


def test_refused_actions_are_masked_and_counted(scored):
    folder, _, _ = scored
    missing = [line for line in transcript_lines(folder) if line["verdict"]["score"] is None]
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert {line["masked"] for line in missing} == {"missing_verdict"}
    assert sum(line["counts"]["masked"].get("missing_verdict", 0) for line in metrics) == len(missing)


def test_the_key_is_in_no_file_of_the_run(scored):
    folder, _, _ = scored
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    assert not [path for path in files if KEY.encode() in path.read_bytes()]


def test_evaluations_ask_nothing(scored):
    _, _, calls = scored
    assert all(call.path == "/v1/messages" for call in calls)


def test_too_many_refusals_stop_the_run_with_a_folder_to_resume(tmp_path):
    with (
        FakeMessagesAPI(lambda call: message(None, stop_reason="refusal", stop_details=REFUSAL)) as api,
        pytest.raises(CoachError, match="It can go on with resume") as stopped,
    ):
        fit_with(api, tmp_path / "run")
    assert stopped.value.exit_code == 4
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"].startswith("CoachError")


@pytest.mark.slow
@pytest.mark.parametrize("ensemble", [False, True])
def test_a_run_that_was_stopped_by_missing_verdicts_goes_on_once_the_coach_is_mended(tmp_path, ensemble):
    mended = False

    def answer(call: Call) -> Answer:
        return message(verdict(call, 7)) if mended else message("I would rather not say.")

    run = tmp_path / "run"
    with FakeMessagesAPI(answer) as api:
        options = ["coach=anthropic", f"coach.provider.base_url={api.url}", "coach.reask=false"]
        if ensemble:
            options = of_two(options[1])
        with pytest.raises(CoachError, match="verdicts are missing"):
            run_fit(run, *options)
        asked = len(api.calls)
        figures = json.loads((run / "summary.json").read_text())["coach"]
        parts = figures.get("coaches", [figures])
        # What was held back at the last moment has failed.
        assert sum(part["calls"] - part["failed"] for part in parts) == asked
        mended = True
        cfg = RunFolder.open(run).config()
        cfg.resume = str(run)
        summary = fit(structured(cfg))
    assert summary["status"] == "done"
    assert summary["coach"]["calls"] == len(api.calls) + sum(part["failed"] for part in parts)
    assert all(line["verdict"]["score"] == 7 for line in transcript_lines(run))


def of_two(base_url: str) -> list[str]:
    """A team of two services, both at the same server."""
    part = (
        "{_target_: lightning_mappa.coaches.llm.LLMCoach, reask: false, "
        "provider: {_target_: lightning_mappa.coaches.anthropic.AnthropicProvider, model: claude-haiku-5-5, "
        f"base_url: '{base_url.partition('=')[2]}'}}, "
        "guard: {_target_: lightning_mappa.coaches.guard.BudgetGuard, model: claude-haiku-5-5}}"
    )
    return ["coach=ensemble", f"coach.coaches=[{part},{part}]"]


def test_without_a_key_nothing_starts(tmp_path, monkeypatch):
    for name in ("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN", "ANTHROPIC_PROFILE", "ANTHROPIC_CONFIG_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(
        ConfigError, match=r"^coach=anthropic needs a key: set the environment variable ANTHROPIC_API_KEY$"
    ):
        run_fit(tmp_path / "run", "coach=anthropic")
    assert not (tmp_path / "run").exists()


def test_a_model_that_is_not_there_stops_it_too(tmp_path):
    with FakeMessagesAPI(every_fifth_refused) as api, pytest.raises(ConfigError, match="HTTP 404"):
        fit_with(api, tmp_path / "run", "coach.provider.model=claude-sonnet-0", "coach.guard.budget_usd=null")
    assert not (tmp_path / "run").exists()
