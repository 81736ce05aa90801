"""Engines, coaches and models for tests: small, quick and decided by the test that makes them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from lightning_mappa.models.char_tokenizer import char_tokenizer
from lightning_mappa.rollout.engine import Generation, GenerationRequest, Session
from lightning_mappa.rollout.fingerprint import ServedFingerprint
from lightning_mappa.types import Episode, StopReason, Verdict

__all__ = ["ScriptedCoach", "ScriptedEngine", "char_tokenizer", "tiny_llama"]


class ScriptedEngine:
    """An `Engine` that answers at once with what `script(request, prompt_text)` returns.

    `prompt_text` is the prompt decoded with its special tokens. The answer is encoded and ended with the
    end-of-turn token, then cut at `max_new_tokens`. There is no model: `log_probs` are placeholders of 0.0.
    What `update_weights` was given is kept in `weights`, what was asked in `requests`.
    """

    def __init__(
        self,
        script: Callable[[GenerationRequest, str], str],
        tokenizer: PreTrainedTokenizerBase,
        *,
        context_length: int = 2048,
    ) -> None:
        self.requests: list[GenerationRequest] = []
        self.weights: dict[str, Mapping[str, Tensor]] = {}
        self._script = script
        self._tokenizer = tokenizer
        self._context_length = context_length
        self._versions: dict[str, int] = {}

    @asynccontextmanager
    async def session(self, episode_id: str) -> AsyncIterator[Session]:
        yield self

    async def generate(self, request: GenerationRequest) -> Generation:
        self.requests.append(request)
        text = self._script(request, str(self._tokenizer.decode(list(request.prompt_ids))))
        ids = [*self._tokenizer.encode(text, add_special_tokens=False), self._tokenizer.eos_token_id]
        kept = tuple(ids[: request.sampling.max_new_tokens])
        return Generation(
            response_ids=kept,
            log_probs=(0.0,) * len(kept),
            stop_reason=StopReason.STOP if len(kept) == len(ids) else StopReason.LENGTH,
            policy_version=self.policy_version(request.agent_id),
        )

    def update_weights(self, agent_id: str, version: int, tensors: Mapping[str, Tensor]) -> None:
        self.weights[agent_id] = tensors
        self._versions[agent_id] = version

    def fingerprints(
        self, agent_id: str, prompt_ids: Sequence[int], token_ids: Sequence[int]
    ) -> list[ServedFingerprint]:
        """None: there are no weights that could be the wrong ones."""
        return []

    def policy_version(self, agent_id: str) -> int:
        return self._versions.get(agent_id, 0)

    def close(self) -> None:
        pass

    def context_length(self, agent_id: str) -> int:
        return self._context_length


class ScriptedCoach:
    """A `Coach` whose score is `fn(episode, index)`; None makes the verdict missing."""

    def __init__(self, fn: Callable[[Episode, int], float | None], *, name: str = "scripted") -> None:
        self.name = name
        self._fn = fn

    async def score(self, episode: Episode, index: int) -> Verdict:
        score = self._fn(episode, index)
        reason = "scripted" if score is not None else "the script gives no score"
        return Verdict(score=score, reason=reason, coach=self.name)


def tiny_llama(vocab_size: int, seed: int, hidden: int = 32, layers: int = 2) -> LlamaForCausalLM:
    """A Llama with random weights, float32, eval mode, four heads, context 512; the same for the same seed.

    Its weights are large enough that next-token distributions are far from uniform.
    """
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        initializer_range=0.2,
        tie_word_embeddings=True,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).eval()
