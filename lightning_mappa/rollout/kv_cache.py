"""A KV cache of known capacity: tokens are written in place instead of copying the whole cache per token."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer


class PreallocatedLayer(DynamicLayer):
    """A full-attention cache layer for at most `capacity` tokens; keys and values are views of its buffers."""

    keys: Tensor
    values: Tensor

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self._capacity = capacity

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self._key_buffer, self._value_buffer = (
            states.new_empty(*states.shape[:2], self._capacity, states.shape[3])
            for states in (key_states, value_states)
        )
        self._show(0)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Appends [batch, heads, tokens, head size] and returns all keys and values so far."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = self.get_seq_length()
        end = start + key_states.shape[2]
        self._key_buffer[:, :, start:end] = key_states
        self._value_buffer[:, :, start:end] = value_states
        self._show(end)
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the rows `indices`, in ascending order, and moves only what is in use."""
        for buffer, states in ((self._key_buffer, self.keys), (self._value_buffer, self.values)):
            buffer[: len(indices), :, : states.shape[2]] = states[indices]
        self._key_buffer = self._key_buffer[: len(indices)]
        self._value_buffer = self._value_buffer[: len(indices)]
        self._show(self.keys.shape[2])

    def _show(self, length: int) -> None:
        self.keys, self.values = self._key_buffer[:, :, :length], self._value_buffer[:, :, :length]


def preallocated_cache(config: PreTrainedConfig, capacity: int) -> DynamicCache:
    """The cache that fits the model; layers of other kinds (sliding window, recurrent) stay as they are."""
    cache = DynamicCache(config=config)
    cache.layers = [PreallocatedLayer(capacity) if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache
