"""Too many missing verdicts end the run, whatever the coach is made of, and what is paid for is booked first."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest
from omegaconf import OmegaConf

from lightning_mappa.coaches.caps import CappedCoach
from lightning_mappa.coaches.cascade import CascadeCoach
from lightning_mappa.coaches.ensemble import EnsembleCoach
from lightning_mappa.coaches.guard import BudgetGuard
from lightning_mappa.coaches.rules import RulesCoach
from lightning_mappa.coaches.shuffled import ShuffledCoach
from lightning_mappa.coaches.stateful import CalibratedCoach
from lightning_mappa.coaches.table_rules import TableRulesCoach
from lightning_mappa.coaches.watch import MissingWatch, missing_watch
from lightning_mappa.errors import CoachError, ConfigError
from lightning_mappa.testing import ScriptedCoach
from lightning_mappa.types import ActionStatus, Episode, EpisodeStatus, Task, ToolResult, ToolStatus, Verdict
from tests.fake_messages_api import MODEL, Answer, Call, message, verdict
from tests.unit.coaches.calls import PRICES
from tests.unit.coaches.test_table_rules import STAGES, TASK, program
from tests.unit.factories import make_action
from tests.unit.rollout.test_coach_overlap import TwoActions
from tests.unit.rollout.test_coordinator import TASKS, OneAgent, collect, make

GIVEN = Verdict(score=7.0, reason="", coach="c")
MISSING = Verdict(score=None, reason="no reply", coach="c")


def see(watch: MissingWatch, *verdicts: Verdict) -> None:
    for given in verdicts:
        watch.see(make_action(), given)


def test_more_than_the_rate_of_the_window_ends_the_run():
    watch = MissingWatch(0.2, 10)
    see(watch, GIVEN, MISSING, GIVEN, MISSING)
    with pytest.raises(
        CoachError,
        match=r"3 of the last 5 verdicts are missing; with more than coach.max_missing_rate=0.2 of 10 the run stops. "
        r"The last: no reply. It can go on with resume",
    ) as stopped:
        see(watch, MISSING)
    assert stopped.value.exit_code == 4


def test_missing_verdicts_long_ago_are_forgotten():
    see(MissingWatch(0.2, 10), *([MISSING, GIVEN, GIVEN, GIVEN, GIVEN] * 20))
    with pytest.raises(CoachError):
        see(MissingWatch(0.2, 10), *([MISSING, GIVEN, GIVEN, GIVEN] * 20))


def test_the_bounds_of_the_rate():
    see(MissingWatch(1, 4), *([MISSING] * 20))
    with pytest.raises(CoachError):
        see(MissingWatch(0, 4), MISSING)


def test_what_no_coach_can_judge_does_not_count():
    watch = MissingWatch(0, 1)
    watch.see(make_action(status=ActionStatus.PROMPT_TOO_LONG), MISSING)
    watch.see(make_action(tool_results=(ToolResult(status=ToolStatus.SANDBOX_ERROR),)), MISSING)
    watch.see(make_action(), replace(MISSING, unjudgeable=True))
    with pytest.raises(CoachError):
        watch.see(make_action(), MISSING)


@pytest.mark.parametrize(
    ("rate", "window", "sentence"),
    [
        (1.5, 10, "coach.max_missing_rate is 1.5; allowed: 0 to 1, or null"),
        ("many", 10, "coach.max_missing_rate is 'many'; allowed: 0 to 1, or null"),
        (True, 10, "coach.max_missing_rate is True; allowed: 0 to 1, or null"),
        (float("nan"), 10, "coach.max_missing_rate is nan; allowed: 0 to 1, or null"),
        ([0.2], 10, "coach.max_missing_rate is [0.2]; allowed: 0 to 1, or null"),
        (0.2, 0, "coach.missing_window is 0; allowed: 1 or more, or null"),
        (0.2, 2.5, "coach.missing_window is 2.5; allowed: 1 or more, or null"),
        (0.2, "wide", "coach.missing_window is 'wide'; allowed: 1 or more, or null"),
    ],
)
def test_wrong_settings_are_refused_in_one_sentence(rate, window, sentence):
    with pytest.raises(ConfigError) as refused:
        MissingWatch(rate, window)
    assert str(refused.value) == sentence


@pytest.mark.parametrize("key", ["max_missing_rate", "missing_window"])
def test_null_is_no_watch(key):
    assert missing_watch(OmegaConf.create({key: None})) is None
    assert missing_watch(OmegaConf.create({})) is not None
    with pytest.raises(ConfigError, match=rf"coach.{key} is 'x'; allowed"):
        missing_watch(OmegaConf.create({key: "x"}))


def silent(name: str = "silent") -> ScriptedCoach:
    return ScriptedCoach(lambda episode, index: None, name=name)


def seven() -> ScriptedCoach:
    return ScriptedCoach(lambda episode, index: 7.0)


class Raising:
    name = "raising"

    async def score(self, episode, index):
        raise ValueError("broken")


class Hanging:
    name = "hanging"

    async def score(self, episode, index):
        await asyncio.sleep(60)


OF_NO_VERDICT = {
    "one": silent(),
    "ensemble": EnsembleCoach([silent(), silent()]),
    "abstaining": EnsembleCoach([ScriptedCoach(lambda e, i: 0.0), seven()], max_spread=1, on_disagreement="abstain"),
    "cascade": CascadeCoach([silent(), silent()]),
    "calibrated": CalibratedCoach(silent()),
    "shuffled": ShuffledCoach(silent()),
    "capped": CappedCoach(silent()),
    "raising": Raising(),
    "hanging": Hanging(),
    "off the scale": ScriptedCoach(lambda e, i: 11.0),
}


@pytest.mark.parametrize("coach", OF_NO_VERDICT.values(), ids=OF_NO_VERDICT.keys())
def test_verdicts_of_any_coach_count(coach):
    with pytest.raises(CoachError, match=r"3 of the last 3 verdicts are missing"):
        collect(make(coach=coach, missing=MissingWatch(0.25, 8), deadline_s=0.3))


def test_the_rules_count_where_there_is_nothing_to_check_against():
    tasks = [replace(task, reference="no integer") for task in TASKS]
    with pytest.raises(CoachError, match=r"verdicts are missing.*no reference in integers"):
        collect(make(TwoActions(), RulesCoach(), missing=MissingWatch(0.25, 8)), tasks=tasks)


BROKEN = (ToolResult(status=ToolStatus.SANDBOX_ERROR),)
SUM = Task(id="t", kind="test", prompt="1 + 2?", reference="3")
BY_RULES = {
    "cut before the agent was done": (
        TableRulesCoach(STAGES),
        Episode(id="e", task=TASK, actions=(program("engineer"),), status=EpisodeStatus.FAILED),
    ),
    "no part in the stages": (TableRulesCoach(STAGES), Episode(id="e", task=TASK, actions=(program("critic"),))),
    "sandbox broken upstream, of files": (
        TableRulesCoach(STAGES),
        Episode(
            id="e",
            task=TASK,
            actions=(program("engineer", status=ToolStatus.SANDBOX_ERROR), replace(program("modeler"), index=1)),
        ),
    ),
    "sandbox broken upstream, of numbers": (
        RulesCoach(),
        Episode(
            id="e",
            task=SUM,
            actions=(
                make_action(agent_id="a", tool_results=BROKEN),
                make_action(agent_id="b", index=1, text="\\boxed{5}"),
            ),
        ),
    ),
}


@pytest.mark.parametrize(
    "around",
    [
        lambda coach: coach,
        lambda coach: EnsembleCoach([coach, coach]),
        lambda coach: CascadeCoach([seven(), coach]),
        CalibratedCoach,
        ShuffledCoach,
    ],
    ids=["one", "ensemble", "cascade", "calibrated", "shuffled"],
)
@pytest.mark.parametrize(("rules", "episode"), BY_RULES.values(), ids=BY_RULES.keys())
def test_where_rules_find_nothing_to_judge_no_coach_made_of_them_is_at_fault(rules, episode, around):
    index = len(episode.actions) - 1
    verdict = asyncio.run(around(rules).score(episode, index))
    assert (verdict.score, verdict.unjudgeable) == (None, True)
    MissingWatch(0, 1).see(episode.actions[index], verdict)


class FailsHalfway(OneAgent):
    """In every episode but the last."""

    async def run(self, task, agents):
        text = (await agents["a"].act(task, ())).text
        if task is not TASKS[-1]:
            raise RuntimeError("broken")
        return text


def test_in_episodes_that_failed_nobody_has_to_know_what_to_judge():
    def only_complete(episode, index):
        return None if episode.status is EpisodeStatus.FAILED else 7.0

    rollout = collect(make(FailsHalfway(), ScriptedCoach(only_complete), missing=MissingWatch(0, 1)))
    assert [scored.verdicts[0].score for scored in rollout.episodes] == [None] * 6 + [7.0] * 2
    with pytest.raises(CoachError):
        collect(make(FailsHalfway(), silent(), missing=MissingWatch(0, 1)))


@pytest.mark.parametrize("kind", [EnsembleCoach, CascadeCoach])
@pytest.mark.parametrize("turned", [False, True])
def test_a_failure_beside_rules_that_find_nothing_to_judge_is_a_failure(kind, turned):
    rules, episode = BY_RULES["no part in the stages"]
    parts = [rules, silent()]
    verdict = asyncio.run(kind(parts[::-1] if turned else parts).score(episode, 0))
    assert (verdict.score, verdict.unjudgeable) == (None, False)


@pytest.mark.parametrize(
    "coach",
    [EnsembleCoach([silent(), seven()]), CascadeCoach([silent(), seven()]), seven()],
    ids=["ensemble", "cascade", "one"],
)
def test_a_part_that_is_missing_where_the_whole_is_not_does_not_count(coach):
    rollout = collect(make(coach=coach, missing=MissingWatch(0, 8)))
    assert {scored.verdicts[0].score for scored in rollout.episodes} == {7.0}


def test_evaluations_count_nothing():
    collect(make(coach=silent(), missing=MissingWatch(0, 1)), scored=False)


@pytest.mark.parametrize("around", [lambda coach: coach, lambda coach: EnsembleCoach([coach, coach])])
def test_when_it_ends_the_run_calls_in_flight_are_booked(serve, tmp_path, around):
    """Refusals come at once, other replies are slow: they are paid for, and so they are waited for."""

    def answer(call: Call) -> Answer:
        if "say 0" in json.dumps(call.body["messages"]):
            return message(None, stop_reason="refusal")
        return Answer(body=message(verdict(call, 7)).body, delay_s=0.5)

    guard = BudgetGuard(model=MODEL, prices={MODEL: PRICES}, budget_usd=1)
    service = serve(answer, guard=guard, show_reference="none")
    service.coach.bind(tmp_path)
    coordinator = make(coach=around(service.coach), missing=MissingWatch(0, 1), max_episodes_in_flight=8)
    with pytest.raises(CoachError, match="verdicts are missing"):
        collect(coordinator)
    figures = service.coach.summary()
    asked = len(service.api.calls)
    assert asked > 2
    assert figures["calls"] - figures["failed"] == asked  # what was held back at the last moment has failed
    assert guard.summary()["tokens"]["output"] == 20 * asked
