"""Two who act with one agent's weights: one model answers, and each stays who it is."""

from __future__ import annotations

import asyncio

from lightning_mappa.types import Task
from tests.unit.workflows.table import Table, spec

TASK = Task(id="t", kind="math", prompt="Q", reference="3")


def test_the_owners_weights_answer_and_the_action_names_both():
    table = Table({"solver": ["one", "two"]})
    seen = [asyncio.run(table.seat(spec(name, weights="solver")).act(TASK, ())) for name in ("solver", "critic")]
    assert [request.agent_id for request in table.engine.requests] == ["solver", "solver"]
    assert [(a.agent_id, a.role, a.weights, a.owner, a.text) for a in table.actions] == [
        ("solver", "Solver", "solver", "solver", "one"),
        ("critic", "Critic", "solver", "solver", "two"),
    ]
    assert [(message.agent_id, message.role) for message in seen] == [("solver", "Solver"), ("critic", "Critic")]


def test_each_has_seeds_turns_and_limits_of_its_own():
    """The same prompt to the same weights: only the seed tells the two samples apart."""
    table = Table({"solver": ["one", "two", "three"]})
    seed = {("solver", 0): 1, ("critic", 0): 2, ("critic", 1): 3}
    given = spec("critic", weights="solver")
    seat = table.seat(given, seed=lambda agent, turn: seed[agent, turn])
    asyncio.run(table.seat(spec("solver"), seed=lambda agent, turn: seed[agent, turn]).act(TASK, ()))
    asyncio.run(seat.act(TASK, ()))
    asyncio.run(seat.act(TASK, ()))
    first, second, third = table.engine.requests
    assert first.prompt_ids == second.prompt_ids
    assert (first.seed, second.seed, third.seed) == (1, 2, 3)
    assert [(action.agent_id, action.turn, action.seed) for action in table.actions] == [
        ("solver", 0, 1),
        ("critic", 0, 2),
        ("critic", 1, 3),
    ]


def test_an_agent_that_nobody_shares_owns_what_it_does():
    table = Table({"solver": ["one"]})
    asyncio.run(table.seat(spec("solver")).act(TASK, ()))
    (action,) = table.actions
    assert (action.weights, action.owner) == (None, "solver")
