"""A mark holds a score down where its agent's program has the pattern, on tasks of its kind, and nowhere else."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from importlib.resources import files

import pytest
from omegaconf import OmegaConf

from lightning_mappa.coaches.base import needs_outcome
from lightning_mappa.coaches.program_marks import MarkedCoach
from lightning_mappa.coaches.table_rules import TableRulesCoach
from lightning_mappa.errors import ConfigError
from lightning_mappa.models.table_demos import engineer, modeler
from lightning_mappa.testing import ScriptedCoach
from lightning_mappa.types import Episode, Task, ToolCall
from tests.unit.factories import make_action

SHIPPED = OmegaConf.load(str(files("lightning_mappa.conf") / "coach" / "table_programs.yaml")).marks
TASK = Task(id="t", kind="", prompt="", metadata={"targets": ["y"], "type": "classification"})


def verdict(code, *, agent="engineer", kind="tables/classification", score=9.0, marks=SHIPPED):
    calls = () if code is None else (ToolCall(name="python", arguments={"code": code}),)
    action = replace(make_action(agent_id=agent), tool_calls=calls)
    episode = Episode(id="e", task=Task(id="t", kind=kind, prompt=""), actions=(action,))
    return asyncio.run(MarkedCoach(ScriptedCoach(lambda e, i: score), marks).score(episode, 0))


@pytest.mark.parametrize(
    ("code", "capped"),
    [
        ("encoder = OrdinalEncoder().fit(Z[words])", True),
        ("scaler.fit_transform(X_test)", True),
        ("encoder.fit(pd.concat([train, test]))", True),
        ("encoder.fit(X[words])\nZ = encoder.transform(Z)", False),
        ("encoder.fit(\n    pd.concat([train, test])\n)", True),
        ("encoder.fit(train[test.columns[1:]])", False),
        ("encoder.fit(train[list(test)])", False),
        ("encoder.fit(\n    train,  # never on test\n)", False),
        ("model.fit(X, y)\npredict(test)", False),
        ("benefit(test)", False),
        (None, False),
    ],
)
def test_fitting_on_the_rows_to_be_predicted_is_capped(code, capped):
    given = verdict(code)
    assert given.score == (3.0 if capped else 9.0)
    assert given.raw_score == (9.0 if capped else None)
    assert ("fits_on_test" in given.reason) == capped
    assert verdict(code, agent="analyst").score == 9.0


def test_a_forest_of_the_wrong_kind_is_capped_on_its_kind_of_task():
    classes, numbers = "tables/classification", "tables/regression"
    for name, wrong in (("RandomForestRegressor", classes), ("RandomForestClassifier", numbers)):
        for kind in (classes, numbers):
            given = verdict(f"{name}(n_estimators=20)", agent="modeler", kind=kind)
            assert given.score == (2.0 if kind == wrong else 9.0)


def test_shipped_marks_find_the_demonstrated_faults_and_no_right_program():
    assert verdict(engineer(TASK)).score == verdict(engineer(TASK, "forgets")).score == 9.0
    assert verdict(engineer(TASK, "leaks")).score == 3.0
    assert verdict(modeler(TASK), agent="modeler").score == 9.0
    assert verdict(modeler(TASK, "kind"), agent="modeler").score == 2.0


def test_lower_and_missing_scores_stay():
    assert verdict("x.fit(Z)", score=1.0).score == 1.0
    assert verdict("x.fit(Z)", score=1.0).raw_score is None
    assert verdict("x.fit(Z)", score=None).score is None


def test_the_lowest_of_several_caps_holds():
    marks = {
        "a": {"agent": "engineer", "pattern": "x", "cap": 6},
        "b": {"agent": "engineer", "pattern": "y", "cap": 4},
    }
    assert verdict("x y", marks=marks).score == 4.0
    assert verdict("x", marks=marks).score == 6.0


def test_it_waits_for_the_outcome_where_its_coach_does():
    action = make_action()
    rules = TableRulesCoach({"solver": {}})
    assert needs_outcome(MarkedCoach(rules, {}), action, None)


@pytest.mark.parametrize(
    ("mark", "message"),
    [
        ({"agent": "a", "pattern": "("}, "coach.marks.m has agent, pattern; give agent, pattern and cap"),
        ({"agent": "a", "pattern": "x", "cap": 11}, "coach.marks.m.cap=11; allowed: 0 to 10"),
        ({"agent": "a", "pattern": "(", "cap": 3}, r"coach.marks.m.pattern=\(: no regular expression"),
        ({"agent": "a", "pattern": "x", "cap": 3, "kin": "x"}, "coach.marks.m has agent, pattern, cap, kin"),
    ],
)
def test_a_wrong_mark_is_refused(mark, message):
    with pytest.raises(ConfigError, match=message):
        MarkedCoach(ScriptedCoach(lambda e, i: 5.0), {"m": mark})
