"""Two roles that act with one adapter, on one vLLM engine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from peft import PeftModel

from lightning_mappa.models.load import add_adapter
from lightning_mappa.rollout.engine import SamplingParams
from lightning_mappa.rollout.engine_group import AdapterSpec
from lightning_mappa.rollout.vllm_engine import VLLMEngine
from lightning_mappa.seeds import derive_seed
from lightning_mappa.testing import char_tokenizer
from lightning_mappa.types import Action, Task
from lightning_mappa.workflows.conversation import ChatFormat
from lightning_mappa.workflows.prompts import PromptTemplate
from lightning_mappa.workflows.seat import AgentSeat, AgentSpec
from tests.integration.vllm_setup import (
    CONTEXT,
    agent,
    change,
    fingerprint_gap,
    group,
    policy_log_probs,
    ray_cluster,
    save_model,
    trained,
)
from tests.packages import needs

pytestmark = [pytest.mark.slow, needs("vllm"), pytest.mark.timeout(600)]

SPEC = AdapterSpec(r=4, alpha=8, target_modules="all-linear")
TASK = Task(id="t", kind="math", prompt="1 + 1 = ?")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[VLLMEngine, PeftModel]]:
    path = save_model(tmp_path_factory.mktemp("model") / "m", tied=True)
    model = add_adapter(trained(path), r=4, alpha=8, dropout=0.0, target_modules="all-linear", seed=1)
    with ray_cluster():
        engine = VLLMEngine([group(path, agents={"solver": agent(adapter=SPEC)})])
        yield engine, model
        engine.close()


def play(engine: VLLMEngine, roles: tuple[str, ...], episodes: int = 4) -> list[Action]:
    """Every role reads the same prompt in every episode; all episodes are in the engine at a time."""
    tokenizer = char_tokenizer()

    async def one(number: int) -> list[Action]:
        actions: list[Action] = []
        async with engine.session(str(number)) as session:
            for role in roles:
                seat = AgentSeat(
                    spec=AgentSpec(
                        agent_id=role,
                        role=role.title(),
                        system="",
                        user=PromptTemplate("{{ task.prompt }}", agent_id=role, key="user"),
                        observation=PromptTemplate("", agent_id=role, key="observation"),
                        chat=ChatFormat(tokenizer),
                        sampling=SamplingParams(max_new_tokens=16 if role == "solver" else 8),
                        context_length=CONTEXT,
                        weights="solver",
                    ),
                    episode_id=str(number),
                    session=session,
                    workspace=Path("/workspace"),
                    seed=lambda who, turn: derive_seed(0, number, who, turn),
                    actions=actions,
                )
                await seat.act(TASK, ())
        return actions

    async def all_of_them() -> list[list[Action]]:
        return await asyncio.gather(*(one(number) for number in range(episodes)))

    return [action for actions in asyncio.run(all_of_them()) for action in actions]


def test_one_adapter_answers_both_roles_before_and_after_an_update(served: tuple[VLLMEngine, PeftModel]) -> None:
    engine, model = served
    for version in range(3):
        if version:
            engine.update_weights("solver", version, change(model, version))
            assert fingerprint_gap(engine, model, version) < 2e-3
        actions = play(engine, ("solver", "verifier"))
        assert {action.policy_version for action in actions} == {version}
        assert {(action.agent_id, action.owner) for action in actions} == {
            ("solver", "solver"),
            ("verifier", "solver"),
        }
        for action in actions:
            own = policy_log_probs(model, action.prompt_ids, action.response_ids, 1.0).tolist()
            assert max(abs(a - b) for a, b in zip(own, action.rollout_log_probs, strict=True)) < 1e-3


def test_each_role_has_its_own_samples_and_limits(served: tuple[VLLMEngine, PeftModel]) -> None:
    actions = play(served[0], ("solver", "verifier"))
    assert len({action.seed for action in actions}) == len(actions)
    assert len({action.prompt_ids for action in actions}) == 1
    by_role = {role: [a for a in actions if a.agent_id == role] for role in ("solver", "verifier")}
    assert {len(action.response_ids) for action in by_role["verifier"]} <= set(range(1, 9))
    assert any(len(action.response_ids) > 8 for action in by_role["solver"])
    pairs = zip(by_role["solver"], by_role["verifier"], strict=True)
    assert any(one.response_ids[:4] != other.response_ids[:4] for one, other in pairs)


def test_the_same_seeds_give_the_same_answers(served: tuple[VLLMEngine, PeftModel]) -> None:
    first, second = (play(served[0], ("solver", "verifier")) for _ in range(2))
    assert [action.response_ids for action in first] == [action.response_ids for action in second]
