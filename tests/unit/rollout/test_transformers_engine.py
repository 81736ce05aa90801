import asyncio
import copy
import random

import pytest
import torch
from transformers import DynamicCache, MistralConfig, MistralForCausalLM

from lightning_mappa.errors import InfrastructureError
from lightning_mappa.models.load import add_adapter, trained_tensors
from lightning_mappa.policy import TokenLogProbs
from lightning_mappa.rollout.engine import GenerationRequest, SamplingParams
from lightning_mappa.rollout.kv_cache import preallocated_cache
from lightning_mappa.rollout.transformers_engine import ServedModel, TransformersEngine
from lightning_mappa.testing import tiny_llama
from lightning_mappa.types import StopReason

VOCABULARY, EOS = 40, (6, 9)


def served(model, adapter=None, eos=EOS):
    return ServedModel(model=model, eos_token_ids=frozenset(eos), context_length=128, adapter=adapter)


def full_engine(agents=("a", "b"), **options):
    models = {agent_id: served(tiny_llama(VOCABULARY, seed)) for seed, agent_id in enumerate(agents)}
    return TransformersEngine(models, **options)


def lora_model(agents=("a", "b")):
    """One random adapter `for_<agent>` per agent on one base, the first of them active."""
    model = tiny_llama(VOCABULARY, 0)
    for seed, agent_id in enumerate(agents):
        name = f"for_{agent_id}"
        options = {"r": 4, "alpha": 8, "dropout": 0.0, "target_modules": "all-linear", "seed": seed}
        model = add_adapter(model, name=name, **options)
        generator = torch.Generator().manual_seed(seed)
        for tensor in trained_tensors(model, name).values():
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.3)
    return model


def requests(count, agents=("a", "b"), temperature=1.0, top_p=1.0, new=20):
    generator = random.Random(0)
    return [
        GenerationRequest(
            agent_id=agents[index % len(agents)],
            prompt_ids=tuple(generator.randrange(10, VOCABULARY) for _ in range(generator.randrange(1, 30))),
            sampling=SamplingParams(max_new_tokens=new - index % 5, temperature=temperature, top_p=top_p),
            seed=index,
        )
        for index in range(count)
    ]


def assert_same(left, right):
    assert [one.response_ids for one in left] == [one.response_ids for one in right]
    for one, other in zip(left, right, strict=True):
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-5)
        assert one.stop_reason is other.stop_reason


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7, "top_p": 0.8}, {"temperature": 0.0}])
def test_a_batch_equals_single_rows(sampling):
    engine, asked = full_engine(), requests(16, **sampling)
    together = engine.generate_batch(asked)
    assert_same(together, [engine.generate_batch([request])[0] for request in asked])
    assert len({one.response_ids for one in together}) > 8


def test_a_sample_depends_on_its_seed_and_not_on_order_or_batch_size():
    engine, asked = full_engine(), requests(16)
    answers = engine.generate_batch(asked)
    assert_same(answers, engine.generate_batch(asked[::-1])[::-1])
    assert_same(answers, full_engine(max_batch_size=3).generate_batch(asked))
    same_prompt = [
        GenerationRequest(agent_id="a", prompt_ids=(11, 12), sampling=SamplingParams(max_new_tokens=20), seed=seed)
        for seed in range(8)
    ]
    assert len({one.response_ids for one in engine.generate_batch(same_prompt)}) > 4


def test_agents_are_answered_with_their_own_weights():
    asked = requests(2)
    for seed, (request, answer) in enumerate(zip(asked, full_engine().generate_batch(asked), strict=True)):
        alone = TransformersEngine({request.agent_id: served(tiny_llama(VOCABULARY, seed))})
        assert_same([answer], alone.generate_batch([request]))


def test_turns_end_with_any_end_id_or_at_their_own_limit():
    answers = full_engine().generate_batch(asked := requests(32))
    reasons = set()
    for request, answer in zip(asked, answers, strict=True):
        stopped = answer.stop_reason is StopReason.STOP
        reasons.add((answer.stop_reason, answer.response_ids[-1] if stopped else None))
        assert not set(EOS) & set(answer.response_ids[:-1])
        assert (answer.response_ids[-1] in EOS) == stopped
        assert len(answer.response_ids) == len(answer.log_probs)
        assert stopped or len(answer.response_ids) == request.sampling.max_new_tokens
    assert reasons == {(StopReason.STOP, 6), (StopReason.STOP, 9), (StopReason.LENGTH, None)}


def test_finished_rows_leave_the_batch():
    model = tiny_llama(VOCABULARY, 0)
    sizes = []
    model.model.register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    answers = TransformersEngine({"a": served(model)}).generate_batch(asked := requests(12, agents=("a",)))
    lengths = [len(answer.response_ids) for answer in answers]
    expected = [sum(length > step for length in lengths) for step in range(max(lengths))]
    assert [rows for rows, _ in sizes] == expected
    assert len(set(expected)) > 3
    width = max(len(request.prompt_ids) for request in asked)
    assert [tokens for _, tokens in sizes] == [width] + [1] * (max(lengths) - 1)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("with_lora", [False, True])
def test_log_probs_equal_the_trainers(temperature, with_lora):
    model = lora_model() if with_lora else tiny_llama(VOCABULARY, 0)
    adapters = {"a": "for_a", "b": "for_b"} if with_lora else {"a": None, "b": None}
    engine = TransformersEngine({one: served(model, adapter) for one, adapter in adapters.items()})
    trainer = TokenLogProbs(copy.deepcopy(model))
    for request in requests(6, temperature=temperature):
        answer = engine.generate_batch([request])[0]
        if with_lora:
            trainer.model.set_adapter(f"for_{request.agent_id}")
        ids = torch.tensor([request.prompt_ids + answer.response_ids])
        select = torch.arange(ids.shape[1])[None] >= len(request.prompt_ids)
        again = trainer(
            ids, torch.ones_like(ids, dtype=torch.bool), select_BT=select, temperature=temperature, chunk_size=7
        )
        assert again.log_probs_BT[select].tolist() == pytest.approx(answer.log_probs, abs=1e-4)


def test_adapters_in_one_batch_equal_adapters_alone_and_the_base_stays_the_base():
    base = served(tiny_llama(VOCABULARY, 0))
    model = lora_model()
    sizes = []
    model.get_base_model().model.register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    engine = TransformersEngine({"a": served(model, "for_a"), "b": served(model, "for_b"), "frozen": served(model)})
    asked = requests(15, agents=("a", "frozen", "b"))
    mixed = engine.generate_batch(asked)
    assert sizes[0] == 15
    for index, agent_id in enumerate(("a", "frozen", "b")):
        alone = copy.deepcopy(model)
        if agent_id != "frozen":
            alone.set_adapter(f"for_{agent_id}")
            alone = alone.merge_and_unload()
        one = base if agent_id == "frozen" else served(alone)
        own = asked[index::3]
        assert_same(mixed[index::3], TransformersEngine({agent_id: one}).generate_batch(own))


@pytest.mark.parametrize("with_lora", [False, True])
def test_update_replaces_one_agents_weights_in_place(with_lora):
    model = lora_model()
    engine = (
        TransformersEngine({"a": served(model, "for_a"), "b": served(model, "for_b")}) if with_lora else full_engine()
    )
    asked = requests(8)
    before = engine.generate_batch(asked)
    new = (
        trained_tensors(lora_model(("x", "y", "other")), "for_other")
        if with_lora
        else trained_tensors(tiny_llama(VOCABULARY, 7))
    )
    engine.update_weights("a", 3, new)
    after = engine.generate_batch(asked)
    assert (engine.policy_version("a"), engine.policy_version("b")) == (3, 0)
    assert [one.policy_version for one in after] == [3, 0] * 4
    assert_same(before[1::2], after[1::2])
    assert [one.response_ids for one in before[::2]] != [one.response_ids for one in after[::2]]
    if not with_lora:
        fresh = TransformersEngine({"a": served(tiny_llama(VOCABULARY, 7))})
        assert_same(after[::2], fresh.generate_batch(asked[::2]))


@pytest.mark.parametrize("fault", ["missing", "unknown", "misshapen"])
@pytest.mark.parametrize("with_lora", [False, True])
def test_a_failed_update_changes_nothing(with_lora, fault):
    model = lora_model(("a",)) if with_lora else tiny_llama(VOCABULARY, 0)
    engine = TransformersEngine({"a": served(model, "for_a" if with_lora else None)})
    before = {name: tensor.clone() for name, tensor in trained_tensors(model).items()}
    new = {name: tensor + 1 for name, tensor in before.items()}
    last = list(new)[-1]
    if fault == "missing":
        del new[last]
    elif fault == "unknown":
        new["extra.weight"] = torch.zeros(1)
    else:
        new[last] = torch.zeros(1, *new[last].shape)
    with pytest.raises(InfrastructureError, match=last if fault != "unknown" else "extra.weight"):
        engine.update_weights("a", 1, new)
    assert engine.policy_version("a") == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in trained_tensors(model).items())


def test_shared_weights_are_not_updated():
    model, lora = tiny_llama(VOCABULARY, 0), lora_model(("c",))
    engine = TransformersEngine({"a": served(model), "b": served(model), "base": served(lora)})
    with pytest.raises(InfrastructureError, match="also serve 'b'"):
        engine.update_weights("a", 1, trained_tensors(model))
    with pytest.raises(InfrastructureError, match="shared base"):
        engine.update_weights("base", 1, {})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"agent_id": "x"}, "not served"),
        ({"prompt_ids": ()}, "do not fit"),
        ({"prompt_ids": (11,) * 120}, "at most 128"),
        ({"sampling": SamplingParams(max_new_tokens=0)}, "do not fit"),
    ],
)
def test_requests_that_cannot_be_answered_are_refused(change, message):
    request = {
        "agent_id": "a",
        "prompt_ids": (11,),
        "sampling": SamplingParams(max_new_tokens=10),
        "seed": 0,
    } | change
    with pytest.raises(InfrastructureError, match=message):
        full_engine().generate_batch([GenerationRequest(**request)])


def test_damaged_weights_are_an_error_and_not_a_sample():
    model = tiny_llama(VOCABULARY, 0)
    model.lm_head.weight.data[3] = float("nan")
    with pytest.raises(InfrastructureError, match="not finite"):
        TransformersEngine({"a": served(model)}).generate_batch(requests(2, agents=("a",)))


def test_unknown_adapter_is_refused():
    with pytest.raises(ValueError, match="no adapter 'x'"):
        TransformersEngine({"a": served(lora_model(("a",)), "x")})


def test_sessions_decode_in_waves():
    engine, asked = full_engine(), requests(4)

    async def episode(name, request):
        async with engine.session(name) as session:
            return await session.generate(request)

    async def main():
        return await asyncio.gather(*(episode(f"e{request.seed}", request) for request in asked))

    assert_same(asyncio.run(main()), engine.generate_batch(asked))
    assert engine.context_length("a") == 128


def test_cache_layers_grow_in_place_and_keep_rows_in_order():
    generator = torch.Generator().manual_seed(0)
    plain, ours = DynamicCache(config=tiny_llama(9, 0).config), preallocated_cache(tiny_llama(9, 0).config, 12)
    rows = torch.arange(5)
    for tokens, kept in ((6, [0, 1, 3, 4]), (1, [1, 3]), (1, [0]), (4, [0])):
        states = torch.rand(2, len(rows), 4, tokens, 8, generator=generator)
        for layer in range(2):
            for one, other in zip(
                plain.update(states[0], states[1], layer), ours.update(states[0], states[1], layer), strict=True
            ):
                assert torch.equal(one, other)
        assert ours.get_seq_length() == plain.get_seq_length()
        rows = rows[kept]
        for cache in (plain, ours):
            cache.batch_select_indices(torch.tensor(kept))
    with pytest.raises(RuntimeError):
        ours.update(states[0][:1], states[1][:1], 0)


def test_models_with_sliding_windows_decode_the_same():
    config = MistralConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=8, initializer_range=0.2, max_position_embeddings=128,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        engine = TransformersEngine({"a": served(MistralForCausalLM(config))})
    asked = requests(8, agents=("a",))
    assert_same(engine.generate_batch(asked), [engine.generate_batch([one])[0] for one in asked])
