import asyncio

import pytest

from lightning_mappa.errors import ConfigError
from lightning_mappa.types import ActionStatus, Task
from lightning_mappa.workflows.base import Message, last_agent_id
from lightning_mappa.workflows.sequential import SequentialWorkflow
from tests.unit.workflows.table import Sums, Table, spec, tools

TASK = Task(id="t", kind="math", prompt="1+2?", reference="3")
ANSWERS = {
    "solver": ["<think>no</think>2"],
    "executor": ["sum(1+2)", "<think>so</think>it is 3"],
    "verifier": ["\\boxed{3}"],
}


def play(visibility):
    table = Table(ANSWERS)
    seats = {
        "solver": table.seat(spec("solver")),
        "executor": table.seat(spec("executor", tools=tools(Sums()), max_turns=2)),
        "verifier": table.seat(spec("verifier")),
    }
    workflow = SequentialWorkflow(["solver", "executor", "verifier"], visibility)
    return asyncio.run(workflow.run(TASK, seats)), table


@pytest.mark.parametrize(
    ("visibility", "verifier_reads"),
    [("full", "1+2?|solver:2:None|executor:it is 3:3"), ("partial", "1+2?|executor:it is 3:3")],
)
def test_three_agents_with_a_two_turn_tool(visibility, verifier_reads):
    answer, table = play(visibility)
    assert answer == "\\boxed{3}"
    assert [(a.index, a.agent_id, a.turn) for a in table.actions] == [
        (0, "solver", 0),
        (1, "executor", 0),
        (2, "executor", 1),
        (3, "verifier", 0),
    ]
    assert [a.prompt_text for a in table.actions] == ["1+2?", "1+2?|solver:2:None", "saw 3", verifier_reads]
    assert all(a.status is ActionStatus.OK for a in table.actions)


@pytest.mark.parametrize("visibility", ["full", "partial"])
def test_generated_from_is_what_is_recorded(visibility):
    _, table = play(visibility)
    assert [a.prompt_ids for a in table.actions] == [r.prompt_ids for r in table.engine.requests]
    later = [a for a in table.actions if a.turn > 0]
    assert later
    for action in later:
        before = next(a for a in table.actions if (a.agent_id, a.turn) == (action.agent_id, action.turn - 1))
        context = before.prompt_ids + before.response_ids
        assert action.prompt_ids[: len(context)] == context


def test_partial_shows_a_third_agent_only_the_second():
    class Listener:
        role = "Listener"

        def __init__(self, agent_id):
            self.agent_id = agent_id

        async def act(self, task, seen, **extra):
            heard = "".join(message.text for message in seen)
            return Message(agent_id=self.agent_id, role=self.role, text=f"({heard}{self.agent_id})")

    def said(visibility):
        seats = {name: Listener(name) for name in "abc"}
        return asyncio.run(SequentialWorkflow("abc", visibility).run(TASK, seats))

    assert said("partial") == "(((a)b)c)"
    assert said("full") == "((a)((a)b)c)"


def test_agents_are_named_in_order():
    assert SequentialWorkflow(["b", "a"]).agent_ids == ("b", "a")
    assert last_agent_id(SequentialWorkflow(["b", "a"])) == "a"


@pytest.mark.parametrize("order", [[], ["a", "b", "a"]])
def test_an_order_without_agents_or_with_one_twice_is_refused(order):
    with pytest.raises(ConfigError, match=r"workflow\.order="):
        SequentialWorkflow(order)


def test_an_unknown_visibility_is_refused():
    with pytest.raises(ConfigError, match=r"workflow\.visibility=all: allowed are full, partial"):
        SequentialWorkflow(["a"], "all")
