import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import Gemma2Config, Gemma2ForCausalLM, GraniteConfig, GraniteForCausalLM

from lightning_mappa.errors import ConfigError
from lightning_mappa.models.load import add_adapter, trained_tensors
from lightning_mappa.policy import TokenLogProbs, check_head
from lightning_mappa.testing import tiny_llama

VOCABULARY = 40
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


def lora(model, targets="all-linear"):
    model = add_adapter(model, r=4, alpha=8, dropout=0.0, target_modules=targets, seed=0)
    for tensor in trained_tensors(model).values():
        tensor.copy_(torch.linspace(-0.3, 0.3, tensor.numel()).view_as(tensor))
    return model


def batch(rows=4, tokens=9, seed=0):
    """Right-padded ids, their mask, and a selection that starts anywhere after column 0."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (rows, tokens), generator=generator)
    lengths = torch.randint(2, tokens + 1, (rows, 1), generator=generator)
    mask = torch.arange(tokens)[None] < lengths
    select = mask & (torch.rand(rows, tokens, generator=generator) < 0.7)
    select[:, 0] = False
    return ids * mask, mask, select


def naive(model, ids, mask, select, temperature):
    logits = model(input_ids=ids, attention_mask=mask.long()).logits / temperature
    log_probs = logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)
    entropy = torch.distributions.Categorical(logits=logits[:, :-1]).entropy()
    pad = log_probs.new_zeros(len(ids), 1)
    return (torch.cat([pad, one], 1).where(select, 0.0) for one in (log_probs, entropy))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("with_lora", [False, True])
@pytest.mark.parametrize("chunk_size", [1, 5, 1000])
def test_equals_full_logits_with_gradient(dtype, tolerance, with_lora, chunk_size):
    model = tiny_llama(VOCABULARY, 0)
    model = (lora(model) if with_lora else model).to(dtype)
    parameters = [one for one in model.parameters() if one.requires_grad]
    ids, mask, select = batch()
    weights = torch.randn(ids.shape, generator=torch.Generator().manual_seed(1), dtype=dtype)
    expected, entropy = naive(model, ids, mask, select, 0.7)
    expected_gradients = torch.autograd.grad((expected * weights).sum(), parameters)
    got = TokenLogProbs(model)(ids, mask, select_BT=select, temperature=0.7, chunk_size=chunk_size, with_entropy=True)
    gradients = torch.autograd.grad((got.log_probs_BT * weights).sum(), parameters)
    assert got.log_probs_BT.dtype == dtype
    assert select.sum() > 8
    torch.testing.assert_close(got.log_probs_BT, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(got.entropy_BT, entropy, rtol=tolerance, atol=tolerance)
    for one, other in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=10 * tolerance, atol=10 * tolerance)
    assert not got.entropy_BT.requires_grad


@given(st.integers(0, 1000), st.integers(1, 30))
@settings(max_examples=20, deadline=None)
def test_padding_and_chunks_change_nothing(seed, chunk_size):
    policy = TokenLogProbs(tiny_llama(VOCABULARY, 0).double())
    ids, mask, select = batch(seed=seed)
    with torch.no_grad():
        whole = policy(ids, mask, select_BT=select, temperature=1.0, chunk_size=chunk_size).log_probs_BT
        for row in range(len(ids)):
            length = int(mask[row].sum())
            one = (ids[row : row + 1, :length], mask[row : row + 1, :length])
            alone = policy(
                *one, select_BT=select[row : row + 1, :length], temperature=1.0, chunk_size=1000
            ).log_probs_BT
            torch.testing.assert_close(whole[row : row + 1, :length], alone, rtol=1e-10, atol=1e-10)
            assert (whole[row, length:] == 0).all()


@pytest.mark.parametrize(("temperature", "expected"), [(1.0, -0.40761), (0.7, -0.26012)])
def test_temperature_divides_the_logits(temperature, expected):
    model = tiny_llama(4, 0)
    model.lm_head.weight = nn.Parameter(torch.zeros(4, 32))
    model.lm_head.bias = nn.Parameter(torch.tensor([2.0, 1.0, 0.0, -1e9]))
    ids, ones = torch.tensor([[3, 0]]), torch.ones(1, 2, dtype=torch.bool)
    select = torch.tensor([[False, True]])
    got = TokenLogProbs(model)(ids, ones, select_BT=select, temperature=temperature, chunk_size=8)
    assert got.log_probs_BT[0, 1].item() == pytest.approx(expected, abs=1e-5)
    assert got.log_probs_BT[0, 0].item() == 0
    assert got.entropy_BT is None


def test_bf16_models_get_a_float32_softmax():
    model = tiny_llama(VOCABULARY, 0).bfloat16()
    ids, mask, select = batch()
    got = TokenLogProbs(model)(ids, mask, select_BT=select, temperature=1.0, chunk_size=8).log_probs_BT
    logits = model(input_ids=ids, attention_mask=mask.long()).logits.float()
    expected = logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got[:, 1:][select[:, 1:]], expected[select[:, 1:]], rtol=1e-5, atol=1e-5)


class VocabularyRows(torch.utils._python_dispatch.TorchDispatchMode):
    """Records the most rows of the vocabulary's width in any tensor that an operation makes.

    The vocabulary is a prime, 4099, so that only logits and views of the output embedding have its width.
    """

    def __init__(self, embedding):
        super().__init__()
        self.most = 0
        self.own = embedding.untyped_storage().data_ptr()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if not isinstance(tensor, torch.Tensor) or tensor.untyped_storage().data_ptr() == self.own:
                continue
            if tensor.dim() >= 2 and tensor.shape[-1] == 4099:
                self.most = max(self.most, tensor.numel() // 4099)
        return result


def test_no_more_vocabulary_rows_than_a_chunk_are_made_or_kept():
    policy = TokenLogProbs(tiny_llama(4099, 0, hidden=16))
    embedding = policy.model.lm_head.weight
    ids = torch.randint(0, 4099, (6, 12), generator=torch.Generator().manual_seed(0))
    select = torch.ones_like(ids, dtype=torch.bool)
    select[:, 0] = False
    kept = []

    def keep(tensor):
        kept.append(tuple(tensor.shape))
        return tensor

    with VocabularyRows(embedding) as rows, torch.autograd.graph.saved_tensors_hooks(keep, lambda one: one):
        got = policy(ids, torch.ones_like(select), select_BT=select, temperature=1.0, chunk_size=20)
    assert select.sum() == 66
    assert rows.most == 20
    assert (6, 12, 16) in kept
    assert not [shape for shape in kept if len(shape) >= 2 and shape[-1] == 4099]
    with VocabularyRows(embedding) as rows:
        got.log_probs_BT.sum().backward()
    assert rows.most == 20


def test_only_selected_tokens_go_through_the_head():
    policy = TokenLogProbs(tiny_llama(4099, 0))
    ids, mask, select = batch()
    with VocabularyRows(policy.model.lm_head.weight) as rows, torch.no_grad():
        policy(ids, mask, select_BT=select, temperature=1.0, chunk_size=1000)
    assert rows.most == select.sum() > 8


def test_an_empty_selection_stays_in_the_graph():
    policy = TokenLogProbs(tiny_llama(VOCABULARY, 0))
    ids, mask, _ = batch()
    got = policy(ids, mask, select_BT=torch.zeros_like(mask), temperature=1.0, chunk_size=8)
    got.log_probs_BT.sum().backward()
    assert (got.log_probs_BT == 0).all()
    assert all((one.grad == 0).all() for one in policy.parameters())


def test_models_that_cap_or_scale_logits_are_refused():
    for refused in (
        Gemma2ForCausalLM(Gemma2Config(**SMALL, final_logit_softcapping=30.0)),
        GraniteForCausalLM(GraniteConfig(**SMALL, logits_scaling=8.0)),
    ):
        with pytest.raises(ConfigError, match="caps or scales"):
            check_head(refused)
    check_head(Gemma2ForCausalLM(Gemma2Config(**SMALL, final_logit_softcapping=None)))


def test_lora_on_the_head_is_refused_and_the_check_leaves_the_mode_alone():
    model = tiny_llama(VOCABULARY, 0).train()
    check_head(model)
    assert model.training
    assert not model.lm_head._forward_hooks
    with pytest.raises(ConfigError, match="target_modules"):
        TokenLogProbs(lora(model, targets=["lm_head"]))
