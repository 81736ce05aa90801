"""What a policy shared by several roles needs, against the same roles with weights of their own."""

from __future__ import annotations

import pytest

from lightning_mappa.errors import ConfigError
from lightning_mappa.plan.plan import make_plan
from lightning_mappa.plan.report import as_data
from tests.unit.plan.test_plan import SETS, composed, shown

SHARED = ("agents.executor.weights=solver", "agents.verifier.weights=solver")


def test_samples_and_optimizer_steps_are_those_of_one_agent_with_every_roles_actions():
    """1 + 2 + 1 turns in 16 x 2 episodes are 128 actions in 8 mini-batches of 16: apart 32, 64 and 32 in 2, 4 and 2."""
    shared, apart = (make_plan(composed(*overrides)) for overrides in (SHARED, ()))
    (batch,) = shared.batches.agents.values()
    assert (batch.turns, batch.actions, batch.mini_batches) == (4, 128, 8)
    assert [one.mini_batches for one in apart.batches.agents.values()] == [2, 4, 2]
    assert shared.batches.total_actions == apart.batches.total_actions == 30 * 128
    odd = ("datamodule.n_samples_per_prompt=1", "algorithm.mini_batch_size=12")
    shared, apart = (make_plan(composed(*overrides, *odd)) for overrides in (SHARED, ()))
    assert (shared.batches.optimizer_steps, apart.batches.optimizer_steps) == (30 * 6, 30 * (2 + 3 + 2))


def test_weights_states_and_engine_are_there_once():
    shared, apart = (make_plan(composed(*overrides)) for overrides in (SHARED, ()))
    assert [one.owner for one in shared.processes] == ["solver, trainer", "engine of all agents"]
    assert shared.sync_bytes * 3 == apart.sync_bytes
    for part in ("optimizer states", "reference", "gradients"):
        one, three = (
            [h.bytes for device in plan.devices for h in device.holdings if h.part == part] for plan in (shared, apart)
        )
        assert one * 3 == three


def test_on_gpus_one_set_of_ranks_and_engines_is_placed():
    paper = ("experiment=mathchat_qwen3_4b", *SETS)
    planned = make_plan(composed(*paper, *SHARED))
    assert {(one.owner, one.gpu) for one in planned.processes} == {
        ("solver, rank 0", 0),
        ("engine 0 of solver", 0),
        ("solver, rank 1", 1),
        ("engine 1 of solver", 1),
    }
    assert planned.sync_bytes == 2 * 2 * 4_022_468_096  # engines, bytes a weight
    assert planned.batches.optimizer_steps == 128 * (64 * 4 // 16)
    assert planned.problems == ()


def test_the_coach_is_asked_about_every_role_at_its_own_length():
    coach = ("coach=anthropic", "agents.verifier.max_new_tokens=40")
    shared, apart = (make_plan(composed(*overrides, *coach)) for overrides in (SHARED, ()))
    assert shared.bills == apart.bills
    assert shared.bills[0].calls == 30 * 128


def test_the_plan_says_who_acts_with_the_weights():
    planned = make_plan(composed(*SHARED))
    assert "the weights of solver act as solver, executor, verifier" in shown(planned)
    assert "act as" not in shown(make_plan(composed()))
    (agent,) = as_data(planned)["agents"].values()
    assert [(one["role"], one["turns"], one["with_tools"]) for one in agent["roles"]] == [
        ("solver", 1, False),
        ("executor", 2, True),
        ("verifier", 1, False),
    ]


def test_a_role_whose_answers_do_not_fit_the_shared_context_is_named():
    with pytest.raises(
        ConfigError, match=r"agents.verifier: .* 600 new ones do not fit a context of 512; .*agents.solver"
    ):
        make_plan(composed(*SHARED, "agents.verifier.max_new_tokens=600"))
