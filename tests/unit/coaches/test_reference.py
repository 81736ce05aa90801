"""Who is judged with the reference in view, whatever stands around the coach and however the episode ended."""

from __future__ import annotations

import json

import pytest

from lightning_mappa.coaches.caps import CappedCoach
from lightning_mappa.coaches.cascade import CascadeCoach
from lightning_mappa.coaches.ensemble import EnsembleCoach
from lightning_mappa.coaches.rules import RulesCoach
from lightning_mappa.coaches.shuffled import ShuffledCoach
from lightning_mappa.coaches.stateful import CalibratedCoach
from tests.fake_messages_api import message, verdict
from tests.unit.rollout.test_coordinator import collect, make

AROUND = {
    "alone": lambda coach: coach,
    "ensemble": lambda coach: EnsembleCoach([coach, RulesCoach()]),
    "cascade": lambda coach: CascadeCoach([RulesCoach(), coach]),
    "capped": CappedCoach,
    "calibrated": CalibratedCoach,
    "shuffled": ShuffledCoach,
}


class CutAfterFirst:
    """Agents a and b; of the task t1 only the first acts."""

    agent_ids = ("a", "b")

    async def run(self, task, agents):
        await agents["a"].act(task, ())
        if task.id == "t1":
            raise RuntimeError("no power")
        return (await agents["b"].act(task, ())).text


class EndsWithB(CutAfterFirst):
    last_agent_id = "b"


@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND.keys())
@pytest.mark.parametrize("workflow", [EndsWithB(), CutAfterFirst()], ids=["knows its end", "does not"])
def test_only_the_last_agent_of_a_complete_episode_is_judged_with_the_reference(serve, workflow, around):
    service = serve(lambda call: message(verdict(call, 7)), show_reference="last")
    collect(make(workflow, around(service.coach)), n_samples=1)
    questions = [call.body["messages"][0]["content"][1]["text"] for call in service.api.calls]
    assert len(questions) == 4 + 3
    with_reference = [question for question in questions if "The reference:" in question]
    assert len(with_reference) == (3 if workflow.__class__ is EndsWithB else 0)
    assert all("as a step of b." in question for question in with_reference)
    assert not [question for question in questions if "no power" in question]
    assert "The reference:" not in json.dumps([call.body["system"] for call in service.api.calls])
