"""Bytes by hand, and against real tensors of the packaged model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor

from lightning_mappa.models.load import add_adapter, load_model
from lightning_mappa.plan.memory import (
    DTYPE_BYTES,
    Part,
    TrainerShape,
    activations,
    engine_weights,
    kv_bytes_per_token,
    logits_chunk,
    trainer_parts,
)
from lightning_mappa.plan.model_facts import ModelFacts, model_facts

FACTS = ModelFacts(
    parameters=1_000_000,
    layers=2,
    hidden=8,
    intermediate=16,
    heads=4,
    kv_heads=2,
    head_dim=2,
    vocab=100,
    max_positions=64,
    linears=(),
)


def shape(**changed: Any) -> TrainerShape:
    settings: dict[str, Any] = {
        "facts": FACTS,
        "strategy": "single_device",
        "ranks": 1,
        "dtype": "float32",
        "bf16": False,
        "lora_parameters": 0,
        "reference": True,
        "checkpointing": False,
        "rows": 1,
        "tokens": 10,
        "chunk": 4,
        "on_gpu": False,
    }
    return TrainerShape(**(settings | changed))


def by_name(parts: tuple[Part, ...]) -> dict[str, tuple[int, int]]:
    """Part → bytes on the device, bytes in host memory."""
    return {part.name: (part.device, part.host) for part in parts}


def n_bytes(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize(
    ("dtype", "lora"), [("float32", False), ("bfloat16", False), ("float32", True), ("bfloat16", True)]
)
def test_states_are_those_of_real_tensors_to_the_byte(dtype: str, lora: bool):
    model: Any = load_model("tiny", dtype=dtype)
    if lora:
        model = add_adapter(model, r=8, alpha=16, dropout=0.0, target_modules="all-linear", seed=0)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    ids = torch.arange(8)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()

    facts = model_facts("tiny")
    adapter = facts.lora_parameters(8, "all-linear") if lora else 0
    parts = by_name(trainer_parts(shape(facts=facts, dtype=dtype, lora_parameters=adapter)))
    adapter_bytes = n_bytes(p for p in trained) if lora else 0
    moments = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    assert parts["weights"][0] == n_bytes(model.parameters()) - adapter_bytes
    assert parts.get("adapter", (0, 0))[0] == adapter_bytes
    assert parts["gradients"][0] == n_bytes(p.grad for p in trained)
    assert parts["optimizer states"][0] == n_bytes(moments)
    assert parts["reference"][0] == n_bytes(p.detach().clone() for p in trained)


@pytest.mark.parametrize(("r", "targets"), [(1, "all-linear"), (8, "all-linear"), (4, ["q_proj", "down_proj"])])
def test_lora_parameters_are_those_of_a_real_adapter(r: int, targets: Any):
    model = add_adapter(load_model("tiny", dtype="float32"), r=r, alpha=1, dropout=0.0, target_modules=targets, seed=0)
    assert isinstance(model, PeftModel)
    real = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert model_facts("tiny").lora_parameters(r, targets) == real > 0


def test_mixed_precision_in_one_process_keeps_float32_and_adds_bf16_copies():
    parts = by_name(trainer_parts(shape(bf16=True)))
    assert parts["weights"] == (4_000_000, 0)
    assert parts["autocast copies"] == (2_000_000, 0)
    assert "autocast copies" not in by_name(trainer_parts(shape(bf16=True, dtype="bfloat16")))


MB = 1_000_000
ZERO2 = {
    "weights": (2 * MB, 0),
    "gradients": (1 * MB, 0),
    "master weights": (1 * MB, 0),
    "optimizer states": (2 * MB, 0),
    "reference": (2 * MB, 0),
}
ZERO3 = ZERO2 | {"weights": (MB // 2, 0), "reference": (MB // 2, 0)}


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("zero2", ZERO2),
        ("zero3", ZERO3 | {"gathered weights": (2 * MB, 0)}),
        ("zero3_offload", {name: (0, size) for name, (size, _) in ZERO3.items()} | {"gathered weights": (2 * MB, 0)}),
    ],
)
def test_zero_over_four_ranks_in_bf16(strategy: str, expected: dict[str, tuple[int, int]]):
    """A million weights: bf16 2 MB, float32 gradients and master 4 MB each, AdamW 8 MB, shared by four."""
    parts = by_name(trainer_parts(shape(strategy=strategy, ranks=4, bf16=True)))
    assert {name: parts[name] for name in expected} == expected
    assert ("gathered weights" in parts) == (strategy != "zero2")


def test_zero_with_an_adapter_shares_the_base_and_has_states_of_the_adapter_only():
    parts = by_name(trainer_parts(shape(strategy="zero3", ranks=2, bf16=True, lora_parameters=1000)))
    assert parts["weights"] == (MB, 0)
    assert parts["adapter"] == (1000, 0)
    assert parts["gradients"] == parts["master weights"] == (2000, 0)
    assert parts["optimizer states"] == (4000, 0)
    assert parts["reference"] == (1000, 0)


def test_buckets_are_whole_on_a_gpu_and_as_large_as_they_are_filled_on_the_cpu():
    on_gpu = {"bf16": True, "on_gpu": True}
    assert by_name(trainer_parts(shape(strategy="zero3", **on_gpu)))["gradient buckets"] == (10**9, 0)
    assert by_name(trainer_parts(shape(strategy="zero2", **on_gpu)))["gradient buckets"] == (2 * 10**9, 0)
    assert by_name(trainer_parts(shape(strategy="zero2")))["gradient buckets"] == (4 * MB, 0)


def test_activations_by_hand():
    """a = 4, q = 8, kv = 4: a layer has 8·8 + 16·8 + 16·16 + 16·(8 + 8) = 704 bytes a token."""
    assert activations(shape()) == 10 * 2 * 704
    assert activations(shape(checkpointing=True)) == 10 * (704 + 2 * 4 * 8)
    padded = shape(rows=2, tokens=20)
    assert activations(padded) == 20 * 2 * 704 + 5 * 10 * 10 * 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_activations_are_a_little_above_what_a_real_forward_keeps(dtype: str):
    model = load_model("tiny", dtype=dtype)
    length = 256
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = model.get_decoder()(input_ids=torch.zeros(1, length, dtype=torch.long), use_cache=False)
    assert hidden.last_hidden_state.requires_grad
    planned = activations(shape(facts=model_facts("tiny"), dtype=dtype, tokens=length))
    assert sum(kept.values()) <= planned <= 1.6 * sum(kept.values())


def test_logits_chunk_by_hand():
    assert logits_chunk(shape()) == 4 * 100 * (2 * 4 + 16)
    assert logits_chunk(shape(tokens=3)) == 3 * 100 * 24
    assert logits_chunk(shape(bf16=True)) == 4 * 100 * (2 * 2 + 16)


@pytest.mark.parametrize(
    ("model", "workers", "expected"),
    [
        ("Qwen/Qwen3-4B", 1, 147_456),  # 2 x 36 layers x 8 heads x 128 x 2 bytes
        ("Qwen/Qwen3-4B", 2, 73_728),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", 1, 28_672),  # 2 x 28 x 2 x 128 x 2
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", 4, 14_336),  # one head on each
    ],
)
def test_keys_and_values_of_a_token(model: str, workers: int, expected: int):
    assert kv_bytes_per_token(model_facts(model), "bfloat16", workers) == expected


def test_engine_weights_are_dealt_to_the_workers():
    assert engine_weights(FACTS, "bfloat16") == 2 * MB
    assert engine_weights(FACTS, "float32", 4) == MB
    assert DTYPE_BYTES["float64"] == 8
