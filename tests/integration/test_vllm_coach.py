"""A coach model in vLLM engines of its own: a real engine with random weights, in a cluster that others use too."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_mappa.coaches.guard import BudgetGuard
from lightning_mappa.coaches.llm import LLMCoach
from lightning_mappa.coaches.provider import CoachRequest, RefusedRequestError
from lightning_mappa.coaches.vllm import VLLMProvider
from lightning_mappa.models.load import load_tokenizer
from tests.integration.vllm_setup import ray_cluster
from tests.packages import needs
from tests.unit.coaches.conftest import make_episode

pytestmark = [pytest.mark.slow, needs("vllm"), pytest.mark.timeout(600)]

CONTEXT = 16_384


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Random weights with room for a whole case, and the packaged tokenizer."""
    path: Path = tmp_path_factory.mktemp("coach") / "model"
    tokenizer = load_tokenizer("tiny")
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=CONTEXT,
        initializer_range=0.15,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with ray_cluster():
        yield


def request(question: str = "Judge step 1 alone.", **fields: Any) -> CoachRequest:
    defaults = {"call_id": "e/0", "system": "Rate 0 to 10.", "shared": "The task.", "max_tokens": 24}
    return CoachRequest(question=question, **{**defaults, **fields})


def test_replies_are_the_models_and_the_cluster_outlives_them(folder, cluster):
    import ray

    provider = VLLMProvider(folder, dtype="float32", context_length=CONTEXT)

    async def scene():
        await provider.check()
        try:
            several = await asyncio.gather(*(provider.ask(request(f"Step {n}."), 300.0) for n in (1, 2, 1)))
            with pytest.raises(RefusedRequestError) as refused:
                await provider.ask(request(max_tokens=CONTEXT), 300.0)
            return several, refused.value
        finally:
            await provider.close()

    (first, second, again), refused = asyncio.run(scene())
    assert first.text == again.text != second.text
    assert (first.model, first.structured) == (folder, False)
    assert first.usage.output_tokens == 24 or first.finish == "end"
    tokenizer = load_tokenizer(folder)
    spoken = [
        {"role": "system", "content": "Rate 0 to 10."},
        {"role": "user", "content": "The task.\n\nStep 1."},
    ]
    text = tokenizer.apply_chat_template(spoken, tokenize=False, add_generation_prompt=True)
    assert first.usage.input_tokens == len(tokenizer.encode(text, add_special_tokens=False))
    assert refused.too_long
    assert ray.is_initialized()


def test_replies_are_drawn_by_the_seed_of_the_request_and_by_nothing_else(folder, cluster):
    """The second provider stands for a run that goes on: it does not know what the first was asked."""

    async def texts(*seeds: int) -> list[str]:
        provider = VLLMProvider(folder, dtype="float32", context_length=CONTEXT, temperature=1.0)
        try:
            replies = [await provider.ask(request(seed=seed), 300.0) for seed in seeds]
            return [reply.text for reply in replies]
        finally:
            await provider.close()

    first, second, again = asyncio.run(texts(1, 2**53 - 1, 1))
    assert first == again != second
    assert asyncio.run(texts(2**53 - 1)) == [second]


def test_a_coach_of_random_weights_gives_no_verdict_and_says_why(folder, cluster, tmp_path):
    provider = VLLMProvider(folder, dtype="float32", context_length=CONTEXT)
    guard = BudgetGuard(model=provider.model, budget_calls=10)
    coach = LLMCoach(provider, guard=guard, max_tokens=16, timeout_s=300.0)
    coach.bind(tmp_path)
    verdict = asyncio.run(coach.score(make_episode(), 0))
    coach.close()
    assert verdict.score is None
    assert verdict.reason.endswith("; asked twice")
    assert coach.summary()["calls"] == 2
