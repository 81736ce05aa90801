"""Counted parameters against what the models are known to have, and against the formula by hand."""

from __future__ import annotations

import pytest

from lightning_mappa.errors import ConfigError
from lightning_mappa.models import smollm2
from lightning_mappa.models.load import load_config
from lightning_mappa.plan.known_models import KNOWN_MODELS
from lightning_mappa.plan.model_facts import model_facts


def by_formula(
    vocab: int, h: int, i: int, layers: int, heads: int, kv: int, d: int, *, tied: bool, qkv_bias: bool, qk_norm: bool
) -> int:
    """Parameters of a Llama-like model."""
    q_out, kv_out = heads * d, kv * d
    attention = h * q_out + 2 * h * kv_out + q_out * h
    attention += (q_out + 2 * kv_out if qkv_bias else 0) + (2 * d if qk_norm else 0)
    return (1 if tied else 2) * vocab * h + layers * (attention + 3 * h * i + 2 * h) + h


@pytest.mark.parametrize(
    ("path", "expected", "known"),
    [
        (
            "Qwen/Qwen3-4B",
            by_formula(151936, 2560, 9728, 36, 32, 8, 128, tied=True, qkv_bias=False, qk_norm=True),
            4_022_468_096,
        ),
        (
            "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B",
            by_formula(151936, 1536, 8960, 28, 12, 2, 128, tied=False, qkv_bias=True, qk_norm=False),
            1_777_088_000,
        ),
        (
            "smollm2",
            by_formula(49152, 576, 1536, 30, 9, 3, 64, tied=True, qkv_bias=False, qk_norm=False),
            134_515_008,
        ),
    ],
)
def test_parameters(path: str, expected: int, known: int):
    assert model_facts(path).parameters == expected == known


def test_the_output_embedding_is_no_place_for_an_adapter():
    facts = model_facts("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B")
    assert len(facts.linears) == 28 * 7
    assert not any("lm_head" in linear.name for linear in facts.linears)


@pytest.mark.skipif(not smollm2.is_cached(), reason="needs the converted smollm2 model")
def test_the_table_says_what_the_real_config_says():
    config = load_config("smollm2")[0]
    assert {key: getattr(config, key) for key in KNOWN_MODELS["smollm2"]} == dict(KNOWN_MODELS["smollm2"])


def test_a_folder_is_read_and_one_that_is_not_there_is_named():
    assert model_facts("tiny").parameters == 804_864
    with pytest.raises(ConfigError, match=r"model.path: nothing is known here of './nowhere'; give .* Qwen/Qwen3-4B"):
        model_facts("./nowhere")
