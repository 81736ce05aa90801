"""Architectures that shipped experiments name, so that they can be planned for where no hub can be reached."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_QWEN3_4B: Mapping[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
    "max_position_embeddings": 40960,
}

KNOWN_MODELS: Mapping[str, Mapping[str, Any]] = {
    "Qwen/Qwen3-4B": _QWEN3_4B,
    "Qwen/Qwen3-4B-Thinking-2507": {**_QWEN3_4B, "max_position_embeddings": 262144},
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": {
        "model_type": "qwen2",
        "vocab_size": 151936,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "tie_word_embeddings": False,
        "max_position_embeddings": 131072,
    },
    "smollm2": {
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "tie_word_embeddings": True,
        "max_position_embeddings": 8192,
    },
}
"""`model.path` → the arguments of its Hugging Face config; what is left out is that class's default."""
