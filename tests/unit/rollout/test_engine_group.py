"""What a group of engines accepts, and the tensors it expects."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_mappa.errors import ConfigError, InfrastructureError
from lightning_mappa.models.load import add_adapter, load_model, resolve_path, trained_tensors
from lightning_mappa.rollout.engine import GenerationRequest, SamplingParams
from lightning_mappa.rollout.engine_group import AdapterSpec, EngineGroup, ServedAgent, server_environment
from lightning_mappa.rollout.expected_tensors import check_shapes, expected_shapes
from lightning_mappa.testing import tiny_llama

ADAPTER = AdapterSpec(r=4, alpha=8, target_modules=("q_proj", "down_proj"))


def agent(**fields: Any) -> ServedAgent:
    return ServedAgent(**{"eos_token_ids": frozenset({2}), "context_length": 64, "trained": True, **fields})


def group(**fields: Any) -> EngineGroup:
    return EngineGroup(**{"model_path": "org/model", "dtype": "float32", "agents": {"a": agent()}, **fields})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"agents": {}}, "needs at least one agent"),
        ({"dtype": "float64"}, "model.dtype: got 'float64', engine=vllm serves float32, bfloat16"),
        ({"weight_transport": "smoke"}, "engine.weight_transport: got 'smoke', allowed are object_store, nccl, ipc"),
        ({"num_engines": 0}, "engine.num_engines: got 0, allowed is 1 or more"),
        ({"max_batch_size": 0}, "engine.max_batch_size: got 0"),
        (
            {"agents": {"a": agent(adapter=ADAPTER), "b": agent()}},
            "agents.b: a fully trained agent needs an engine of its own, not one with a",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_its_key(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        group(**fields)


def test_adapters_and_frozen_agents_share_a_group() -> None:
    shared = group(
        agents={
            "a": agent(adapter=ADAPTER),
            "b": agent(adapter=replace(ADAPTER, r=8)),
            "c": agent(trained=False, context_length=128),
        }
    )
    assert shared.name == "a+b+c"
    assert list(shared.adapters) == ["a", "b"]
    assert shared.context_length == 128


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"agent_id": "x"}, "'x' is not served; served are ['a']"),
        ({"prompt_ids": ()}, "0 prompt tokens and 4 new ones do not fit"),
        ({"prompt_ids": (1,) * 61}, "61 prompt tokens and 4 new ones do not fit: at least one of each and at most 64"),
        ({"sampling": SamplingParams(max_new_tokens=0)}, "3 prompt tokens and 0 new ones"),
        ({"sampling": SamplingParams(max_new_tokens=1, temperature=0.001)}, "temperature is 0.001"),
        ({"sampling": SamplingParams(max_new_tokens=1, temperature=2.5)}, "temperature is 2.5"),
        ({"sampling": SamplingParams(max_new_tokens=1, top_p=0.9)}, "top_p is 0.9; engine=vllm samples at 1"),
    ],
)
def test_a_request_that_does_not_fit_is_refused(fields: dict[str, Any], message: str) -> None:
    request = GenerationRequest(agent_id="a", prompt_ids=(1, 2, 3), sampling=SamplingParams(max_new_tokens=4), seed=0)
    group().check(request)
    group().check(replace(request, prompt_ids=(1,) * 60))
    group().check(replace(request, sampling=SamplingParams(max_new_tokens=4, temperature=0.0)))
    with pytest.raises(InfrastructureError, match=re.escape(message)):
        group().check(replace(request, **fields))


def test_an_engine_process_is_told_its_threads_and_stays_off_the_network_with_a_folder(tmp_path: Path) -> None:
    environment = server_environment(group(num_threads=3))
    assert environment["OMP_NUM_THREADS"] == "3"
    assert environment["GOMP_SPINCOUNT"] == "1000"
    assert "HF_HUB_OFFLINE" not in environment
    assert server_environment(group(model_path=str(tmp_path)))["HF_HUB_OFFLINE"] == "1"


@pytest.mark.parametrize("tied", [True, False])
def test_the_shapes_expected_of_a_full_model_are_those_of_its_trainer(tied: bool, tmp_path: Path) -> None:
    model = tiny_llama(50, 0)
    model.config.tie_word_embeddings = tied
    model = type(model)(model.config)
    model.save_pretrained(tmp_path)
    expected = expected_shapes(str(tmp_path), None)
    assert expected == {
        n: tuple(t.shape) for n, t in trained_tensors(load_model(str(tmp_path), dtype="float32")).items()
    }
    assert ("lm_head.weight" in expected) == (not tied)


@pytest.mark.parametrize("targets", [("q_proj", "down_proj"), "all-linear"])
def test_the_shapes_expected_of_an_adapter_are_those_of_its_trainer(targets: tuple[str, ...] | str) -> None:
    path = str(resolve_path("tiny"))
    own = add_adapter(
        load_model("tiny", dtype="float32"), r=4, alpha=8, dropout=0.1, target_modules=targets, seed=3, name="mine"
    )
    expected = expected_shapes(path, AdapterSpec(r=4, alpha=8, target_modules=targets))
    assert expected == {name: tuple(tensor.shape) for name, tensor in trained_tensors(own).items()}
    assert expected


def test_shapes_that_differ_are_named() -> None:
    expected = {"a": (2, 3), "b": (4,)}
    check_shapes("solver", 7, expected, {"b": (4,), "a": (2, 3)})
    for given, message in (
        ({"a": (2, 3)}, "weights of 'solver' at version 7: 1 tensors are missing, among them b"),
        ({"a": (2, 3), "b": (4,), "c": (1,)}, "1 tensors are unknown to the model, among them c"),
        ({"a": (3, 2), "b": (4,)}, "a has shape [3, 2], the model's is [2, 3]"),
    ):
        with pytest.raises(InfrastructureError, match=re.escape(message)):
            check_shapes("solver", 7, expected, given)


def test_expected_shapes_take_no_memory_and_leave_the_random_state_alone() -> None:
    before = torch.random.get_rng_state()
    expected_shapes(str(resolve_path("tiny")), ADAPTER)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_the_drivers_side_never_imports_vllm() -> None:
    """On CPU vLLM changes torch's threads and memory policy for the whole process."""
    code = (
        "import sys, lightning_mappa.rollout.vllm_engine, lightning_mappa.rollout.vllm_server\n"
        "assert not [name for name in sys.modules if name == 'vllm' or name.startswith('vllm.')]\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
