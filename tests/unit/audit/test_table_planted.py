"""Planted faults of teams on tables, and what coaches make of them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hydra import compose, initialize_config_module

from lightning_mappa.audit.audit import audit, audit_coach, require_audit
from lightning_mappa.audit.case_sets import case_set
from lightning_mappa.audit.cases import AuditCase
from lightning_mappa.audit.table_planted import HELD_OUT, OPEN, STAGES, make_table_cases
from lightning_mappa.build import build
from lightning_mappa.checks import check
from lightning_mappa.coaches.rules import RulesCoach
from lightning_mappa.config import structured
from lightning_mappa.errors import ConfigError
from lightning_mappa.file_trail import file_trail, folder_after
from lightning_mappa.testing import ScriptedCoach


class OwnWorkflow:
    agent_ids = ("first", "second")

    def __init__(self, **options: Any) -> None: ...


def config(*overrides: str) -> Any:
    with initialize_config_module("lightning_mappa.conf", version_base="1.3"):
        cfg = structured(compose("audit", overrides=list(overrides)))
    check(cfg)
    return cfg


def report_of(coach: Any, *, seed: int = 0, held_out: bool = False) -> dict[str, Any]:
    return asyncio.run(audit_coach(coach, make_table_cases(seed, 110, held_out=held_out), seed=0))


@pytest.mark.parametrize("held_out", [False, True])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_rules_for_tables_blame_the_guilty(seed: int, held_out: bool):
    coach = build(config("coach=table_rules", "workflow=dsbench").coach, "coach")
    report = report_of(coach, seed=seed, held_out=held_out)
    require_audit(report, 0.95)
    assert report["figures"]["false_blame_rate"]["value"] <= 0.03
    assert report["findings"] == []
    assert report["missing_rate"] == 0
    assert set(report["templates"]) == {template.__name__ for template in (HELD_OUT if held_out else OPEN)}


def test_coaches_that_do_not_look_at_files_are_caught_by_name():
    assert "misses_the_guilty" in report_of(RulesCoach())["findings"]

    def trusts(episode: Any, index: int) -> float:
        return 9.0 if "saved" in episode.actions[index].text or "ready" in episode.actions[index].text else 4.0

    assert "misses_the_guilty" in report_of(ScriptedCoach(trusts))["findings"]


def blames_whoever_fell(episode: Any, index: int) -> float:
    failed = any(not result.ok for result in episode.actions[index].tool_results)
    return 1.0 if failed else 8.0


def test_a_coach_that_blames_whoever_fell_over_a_missing_file_blames_the_innocent():
    report = report_of(ScriptedCoach(blames_whoever_fell))
    assert report["findings"] == ["misses_the_guilty", "blames_the_innocent"]
    template = report["templates"]["model_not_saved"]
    counts = ("n", "blamed", "innocent_actions", "falsely_blamed")
    assert [template[name] for name in counts] == [10, 0, 40, 10]
    assert template["findings"] == ["misses_the_guilty", "blames_the_innocent"]


def test_cases_are_a_function_of_the_seed():
    assert make_table_cases(3, 30) == make_table_cases(3, 30)
    assert make_table_cases(3, 30) != make_table_cases(4, 30)


@pytest.mark.parametrize("held_out", [False, True])
def test_a_case_is_consistent_with_itself(held_out: bool):
    for case in make_table_cases(0, 66, held_out=held_out):
        _check(case)


def _check(case: AuditCase) -> None:
    episode = case.episode
    folder = folder_after(episode.task.metadata["files"], file_trail(episode.actions))
    handed_in = folder.get("submission.csv")
    assert (handed_in is None) == (episode.fault == "missing")
    assert (episode.outcome == 1.0) == (not episode.fault)
    assert [action.index for action in episode.actions] == list(range(len(episode.actions)))
    for action in episode.actions:
        assert bool(action.tool_calls) == bool(action.tool_results) == ("```python" in action.text)
    at_fault = {episode.actions[index].agent_id for index in case.faults}
    assert len(at_fault) == bool(case.faults)
    shown = " ".join(action.prompt_text + action.text for action in episode.actions) + episode.task.id + episode.id
    assert case.template not in shown


def test_the_audit_command_takes_the_team(tmp_path):
    cfg = config("coach=table_rules", "workflow=dsbench", "n_cases=28", f"output_dir={tmp_path}/audit")
    report = audit(cfg)
    assert (report["cases"], report["figures"]["blame_accuracy"]["value"]) == ("dsbench", 1.0)
    with pytest.raises(ConfigError, match="cases is 'chess'; allowed: auto, mathchat, dsbench"):
        config("cases=chess")


@pytest.mark.parametrize(
    ("overrides", "cases"),
    [
        ((), "mathchat"),
        (("workflow=dsbench",), "dsbench"),
        (("experiment=debate",), "mathchat"),
        (("workflow=dsbench", "cases=mathchat"), "mathchat"),
        ((f"workflow={{_target_: {__name__}.OwnWorkflow}}", "cases=dsbench"), "dsbench"),
    ],
)
def test_cases_are_of_the_team_of_the_workflow(overrides, cases):
    assert case_set(config(*overrides)) == cases


@pytest.mark.parametrize(
    "overrides",
    [
        ("workflow={_target_: tests.unit.audit.test_table_planted.OwnWorkflow}",),
        ("workflow=dsbench", "workflow.stages.modeler.makes=[forest.bin]"),
    ],
)
def test_a_team_of_ones_own_has_no_cases_unless_they_are_named(overrides):
    with pytest.raises(ConfigError) as refused:
        case_set(config(*overrides))
    assert "there are no audit cases for the team of" in str(refused.value)
    assert "cases=mathchat or cases=dsbench" in str(refused.value)


def test_stages_are_those_of_the_workflow():
    stages = config("workflow=dsbench").workflow["stages"]
    assert {a: {k: tuple(v) for k, v in f.items()} for a, f in stages.items()} == STAGES
