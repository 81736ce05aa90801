"""Agents with LoRA and frozen agents on one vLLM engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from peft import PeftModel
from transformers import PreTrainedModel

from lightning_mappa.errors import InfrastructureError
from lightning_mappa.models.load import add_adapter, trained_tensors
from lightning_mappa.rollout.engine import Generation, GenerationRequest
from lightning_mappa.rollout.engine_group import AdapterSpec
from lightning_mappa.rollout.vllm_engine import VLLMEngine
from lightning_mappa.rollout.vllm_server import VLLMServer
from tests.integration.vllm_setup import (
    agent,
    answers,
    change,
    fingerprint_gap,
    group,
    largest_gap,
    ray_cluster,
    request,
    save_model,
    spawn_server,
    trained,
)
from tests.packages import needs

pytestmark = [pytest.mark.slow, needs("vllm"), pytest.mark.timeout(600)]

SPECS = {
    "solver": AdapterSpec(r=4, alpha=8, target_modules=("q_proj", "k_proj", "v_proj", "down_proj")),
    "checker": AdapterSpec(r=8, alpha=8, target_modules="all-linear"),
}


class OpenServer(VLLMServer):
    """Also says what vLLM holds, and can be told to keep its prefix cache over updates."""

    keep_cache = False

    async def set_keep_cache(self, keep: bool) -> None:
        self.keep_cache = keep

    async def lora_ids(self) -> list[int]:
        return sorted(await self._call(lambda engine: engine.list_loras()))

    async def memory(self) -> int:
        return int(psutil.Process().memory_info().rss)

    def _reset_cache(self, engine: Any) -> None:
        if not self.keep_cache:
            super()._reset_cache(engine)


@dataclass
class Served:
    engine: VLLMEngine
    base: PreTrainedModel
    models: dict[str, PeftModel]
    versions: dict[str, int]

    def train(self, agent_id: str) -> None:
        self.versions[agent_id] += 1
        self.engine.update_weights(
            agent_id, self.versions[agent_id], change(self.models[agent_id], self.versions[agent_id])
        )

    def model(self, agent_id: str) -> PreTrainedModel | PeftModel:
        return self.models.get(agent_id, self.base)

    def ask_server(self, method: str, *args: object) -> object:
        replica = self.engine._groups()[0].replicas[0]
        return self.engine._wait(replica.ask(method, *args))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    path = save_model(tmp_path_factory.mktemp("model") / "m", tied=True)
    agents = {name: agent(adapter=spec) for name, spec in SPECS.items()} | {"frozen": agent(trained=False)}
    with ray_cluster():
        engine = VLLMEngine([group(path, agents=agents)], spawn=spawn_server(OpenServer))
        models = {
            name: add_adapter(
                trained(path),
                r=spec.r,
                alpha=spec.alpha,
                dropout=0.0,
                target_modules=spec.target_modules,
                seed=1,
                name=name,
            )
            for name, spec in SPECS.items()
        }
        yield Served(engine=engine, base=trained(path), models=models, versions=dict.fromkeys(agents, 0))
        engine.close()


def mixed(count: int = 18, **fields: object) -> list[GenerationRequest]:
    """Agents take turns, so that every batch holds all of them."""
    names = [*SPECS, "frozen"]
    return [
        request(i, agent_id=names[i % 3], temperature=(0.7, 1.0, 1.3)[(i // 3) % 3], **fields)  # type: ignore[arg-type]
        for i in range(count)
    ]


def gaps(served: Served, requests: list[GenerationRequest], generations: list[Generation]) -> dict[str, float]:
    by_agent: dict[str, list[int]] = {}
    for i, one in enumerate(requests):
        by_agent.setdefault(one.agent_id, []).append(i)
    return {
        name: largest_gap(served.model(name), [requests[i] for i in rows], [generations[i] for i in rows])
        for name, rows in by_agent.items()
    }


def test_log_probs_are_those_of_each_agents_own_weights_in_one_batch(served: Served) -> None:
    """The frozen agent too, whom vLLM would answer with an adapter of its neighbours."""
    for step in range(4):
        requests = mixed()
        generations = answers(served.engine, requests)
        assert max(gaps(served, requests, generations).values()) < 1e-3, f"after {step} updates"
        for one, generation in zip(requests, generations, strict=True):
            assert generation.policy_version == served.versions[one.agent_id]
        served.train("solver")
        if step % 2:
            served.train("checker")


def test_the_adapters_and_the_base_say_different_things(served: Served) -> None:
    """Guards the test above: agents served with each other's weights would be seen."""
    served.train("solver")
    served.train("checker")
    requests = mixed(9)
    generations = answers(served.engine, requests)
    right = gaps(served, requests, generations)
    served.models["solver"], served.models["checker"] = served.models["checker"], served.models["solver"]
    swapped = gaps(served, requests, generations)
    served.models["solver"], served.models["checker"] = served.models["checker"], served.models["solver"]
    assert max(right.values()) < 1e-3
    assert swapped["solver"] > 0.1
    assert swapped["checker"] > 0.1
    frozen = [i for i, one in enumerate(requests) if one.agent_id == "frozen"]
    as_solver = largest_gap(served.models["solver"], [requests[i] for i in frozen], [generations[i] for i in frozen])
    assert as_solver > 0.1


def test_fingerprints_of_every_agent_pass_after_updates(served: Served) -> None:
    for _ in range(3):
        for name in SPECS:
            served.train(name)
        for name, version in served.versions.items():
            assert fingerprint_gap(served.engine, served.model(name), version, name) < 2e-3


def test_one_corrupted_tensor_of_an_adapter_is_noticed(served: Served) -> None:
    served.versions["checker"] += 1
    tensors = change(served.models["checker"], 77)
    name = next(n for n in tensors if "layers.1.mlp.up_proj.lora_B" in n)
    served.engine.update_weights("checker", served.versions["checker"], tensors | {name: -tensors[name]})
    with pytest.raises(InfrastructureError, match="differs from the trainer by"):
        fingerprint_gap(served.engine, served.models["checker"], served.versions["checker"], "checker")
    served.engine.update_weights("checker", served.versions["checker"], tensors)
    fingerprint_gap(served.engine, served.models["checker"], served.versions["checker"], "checker")


def test_a_prefix_cache_that_outlives_an_update_is_noticed(served: Served) -> None:
    served.train("solver")
    fingerprint_gap(served.engine, served.models["solver"], served.versions["solver"])  # fills the cache
    served.ask_server("set_keep_cache", True)
    served.train("solver")
    with pytest.raises(InfrastructureError, match="differs from the trainer by"):
        fingerprint_gap(served.engine, served.models["solver"], served.versions["solver"])
    served.ask_server("set_keep_cache", False)
    served.train("solver")
    assert fingerprint_gap(served.engine, served.models["solver"], served.versions["solver"]) < 2e-3


def test_twenty_updates_leave_nothing_behind(served: Served) -> None:
    for _ in range(3):
        served.train("solver")
    before = served.ask_server("lora_ids"), served.ask_server("memory")
    for _ in range(20):
        served.train("solver")
        answers(served.engine, mixed(3, new=4))
    after = served.ask_server("lora_ids"), served.ask_server("memory")
    assert after[0] == before[0] == [1, 2, 3]
    assert after[1] - before[1] < 30 * 2**20  # type: ignore[operator]
    assert not list(Path("/dev/shm").glob("mappa-adapter-*"))
    assert fingerprint_gap(served.engine, served.models["solver"], served.versions["solver"]) < 2e-3


def test_only_the_adapter_travels(served: Served) -> None:
    served.train("solver")
    own = sum(p.numel() * 4 for name, p in served.models["solver"].named_parameters() if "lora_" in name)
    assert served.engine.sync_bytes["solver"] == own


@pytest.mark.parametrize("fault", ["missing", "unknown", "has shape"])
def test_a_faulty_adapter_is_refused_and_the_old_one_stays(served: Served, fault: str) -> None:
    served.train("solver")
    tensors = {n: torch.zeros_like(t) for n, t in trained_tensors(served.models["solver"]).items()}
    name = next(iter(tensors))
    if fault == "missing":
        del tensors[name]
    elif fault == "unknown":
        tensors["lora_A.elsewhere"] = torch.zeros(2)
    else:
        tensors[name] = torch.zeros(2, 2)
    with pytest.raises(InfrastructureError, match=fault):
        served.engine.update_weights("solver", served.versions["solver"] + 1, tensors)
    assert fingerprint_gap(served.engine, served.models["solver"], served.versions["solver"]) < 2e-3
    assert served.engine.restarts == []


def test_a_frozen_agent_cannot_be_updated(served: Served) -> None:
    with pytest.raises(InfrastructureError, match="'frozen' is frozen"):
        served.engine.update_weights("frozen", 1, {})
    assert served.engine.policy_version("frozen") == 0
