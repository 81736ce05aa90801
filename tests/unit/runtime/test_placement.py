"""Who gets how much of which GPU, worked by hand, and what is refused with what to change."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from lightning_mappa.errors import ConfigError
from lightning_mappa.runtime.placement import (
    CPU_SHARE,
    AgentNeeds,
    Cluster,
    Placement,
    engine_groups,
    lay_out,
    place,
)

NODE = Cluster(nodes=1, gpus_per_node=8)


def agent(agent_id: str, **changed: Any) -> AgentNeeds:
    settings: dict[str, Any] = {
        "trained": True,
        "devices": 1,
        "num_engines": 1,
        "tensor_parallel_size": 1,
        "model_path": "base",
        "dtype": "bfloat16",
        "lora": False,
    }
    return AgentNeeds(agent_id=agent_id, **(settings | changed))


def gpu_shares(placement: Placement) -> dict[int, list[float]]:
    shares: dict[int, list[float]] = {}
    for bundle in placement.bundles:
        shares.setdefault(bundle.slot, []).append(bundle.gpus)
    return shares


@pytest.mark.parametrize(
    ("agents", "groups"),
    [
        ([agent("a"), agent("b")], [("a",), ("b",)]),
        ([agent("a", lora=True), agent("b", lora=True)], [("a", "b")]),
        ([agent("a", lora=True), agent("b", lora=True, trained=False)], [("a", "b")]),
        ([agent("a", lora=True), agent("b", lora=True, model_path="other")], [("a",), ("b",)]),
        ([agent("a", lora=True), agent("b", lora=True, dtype="float32")], [("a",), ("b",)]),
        ([agent("a", trained=False), agent("b"), agent("c", trained=False)], [("a", "c"), ("b",)]),
        ([agent("a", trained=False), agent("b", trained=False, model_path="other")], [("a",), ("b",)]),
    ],
)
def test_agents_that_one_engine_serves(agents: list[AgentNeeds], groups: list[tuple[str, ...]]):
    assert list(engine_groups(agents)) == groups


def test_apart_every_rank_and_every_worker_has_a_gpu_of_its_own():
    placement = place([agent("a", devices=2, num_engines=2), agent("b", tensor_parallel_size=2)], NODE)
    assert gpu_shares(placement) == {slot: [1.0] for slot in range(7)}
    assert [len(one.ranks) for one in placement.agents] == [2, 1]
    assert [(one.group, one.replica, len(one.bundles)) for one in placement.engines] == [
        (("a",), 0, 1),
        (("a",), 1, 1),
        (("b",), 0, 2),
    ]
    assert placement.slots == ({"CPU": 1.0, "GPU": 1.0},) * 7


def test_colocated_ranks_and_workers_have_half_a_gpu_each():
    needs = [agent(name, devices=2, num_engines=2) for name in "abc"]
    placement = place(needs, NODE, colocate=True)
    assert gpu_shares(placement) == {slot: [0.5, 0.5] for slot in range(6)}
    for index, one in enumerate(placement.agents):
        assert [bundle.slot for bundle in one.ranks] == [2 * index, 2 * index + 1]
    assert [engine.bundles[0].slot for engine in placement.engines] == list(range(6))
    assert lay_out(placement, NODE) == {slot: (0, slot) for slot in range(6)}


def test_adapters_that_share_an_engine_share_its_gpu():
    placement = place([agent(name, lora=True) for name in "abc"], Cluster(nodes=1, gpus_per_node=1), colocate=True)
    assert gpu_shares(placement) == {0: [0.25] * 4}
    assert placement.slots == ({"CPU": 1.0, "GPU": 1.0},)
    two = place([agent("a", lora=True), agent("b", lora=True)], NODE, colocate=True)
    assert sum(gpu_shares(two)[0]) <= 1
    assert two.slots[0]["GPU"] == 1


def test_frozen_agents_have_no_rank_and_one_engine_that_shares_nothing():
    frozen = [agent("b", trained=False, devices=4), agent("c", trained=False)]
    placement = place([agent("a"), *frozen], NODE, colocate=True)
    assert [one.agent_id for one in placement.agents] == ["a"]
    assert gpu_shares(placement) == {0: [0.5, 0.5], 1: [1.0]}


def test_on_the_cpu_everything_fits_on_two_cores():
    needs = [agent(name, devices=4, num_engines=4) for name in "abc"]
    placement = place(needs, Cluster())
    assert {(bundle.cpus, bundle.gpus) for bundle in placement.bundles} == {(CPU_SHARE, 0.0)}
    assert sum(slot["CPU"] for slot in placement.slots) <= 2
    assert all("GPU" not in slot for slot in placement.slots)
    assert lay_out(placement, Cluster()) == {}


def test_the_transformers_engine_is_one_process_for_all_agents():
    placement = place([agent("a"), agent("b", devices=2)], NODE, one_engine=True)
    (engine,) = placement.engines
    assert engine.group == ("a", "b")
    assert engine.bundles[0].gpus == 0
    assert len(lay_out(placement, NODE)) == 3


def test_workers_of_one_engine_lie_on_one_node():
    cluster = Cluster(nodes=2, gpus_per_node=4)
    placement = place([agent("a", devices=2, tensor_parallel_size=4)], cluster)
    assert lay_out(placement, cluster) == {
        **{0: (0, 0), 1: (0, 1)},
        **{2: (1, 0), 3: (1, 1), 4: (1, 2), 5: (1, 3)},
    }
    too_small = Cluster(nodes=2, gpus_per_node=3)
    scattered = place(
        [agent("a", devices=2, tensor_parallel_size=2), agent("b", tensor_parallel_size=2, trained=False)], too_small
    )
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=2 finds no node .* add nodes"):
        lay_out(scattered, too_small)


@pytest.mark.parametrize(
    ("agents", "colocate", "sentence"),
    [
        ([agent("a", devices=8)], False, r"needs 9 GPUs and there are 8 \(1 x 8\): lower .*runtime.colocate=true"),
        ([agent("a", tensor_parallel_size=16)], False, r"agents.a.tensor_parallel_size is 16, but a node has 8 GPUs"),
        (
            [agent("a", devices=2)],
            True,
            r"agents.a.devices is 2 and num_engines x tensor_parallel_size is 1: set them alike",
        ),
        (
            [agent("a", lora=True), agent("b", lora=True, num_engines=2)],
            False,
            r"agents.a.num_engines is 1 and agents.b.num_engines is 2, but one engine serves both",
        ),
        (
            [agent("a", trained=False), agent("b", trained=False, tensor_parallel_size=2)],
            False,
            r"agents.a.tensor_parallel_size is 1 and agents.b.tensor_parallel_size is 2",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_change(agents: list[AgentNeeds], colocate: bool, sentence: str):
    with pytest.raises(ConfigError, match=sentence):
        place(agents, NODE, colocate=colocate)


def test_placement_needs_no_ray():
    code = "import sys, lightning_mappa.runtime.placement; sys.exit('ray' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
