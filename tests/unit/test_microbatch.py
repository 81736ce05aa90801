import pytest
import torch

from lightning_mappa.datamodules.collate import collate
from lightning_mappa.errors import ConfigError
from lightning_mappa.microbatch import ForwardSize, cut, forward, forward_in_pieces, padding
from lightning_mappa.policy import TokenLogProbs
from lightning_mappa.ranks import Ranks
from lightning_mappa.testing import tiny_llama
from tests.unit.factories import make_experience

VOCAB = 24
SIZE = ForwardSize(sequences=16)


def make_batch():
    responses = [(5, 6, 7), (), (8,), (9, 10, 11, 12)]
    return collate(
        [
            make_experience(key=(f"e{row}", 0), prompt_ids=tuple(range(1, 3 + row)), response_ids=ids, temperature=0.7)
            for row, ids in enumerate(responses)
        ],
        step=0,
    )


def test_cut_keeps_order_and_drops_nothing():
    assert [list(piece) for piece in cut([3, 1, 4, 1, 5], 2)] == [[3, 1], [4, 1], [5]]
    assert list(cut([], 2)) == []


def test_pieces_give_what_one_forward_gives():
    policy = TokenLogProbs(tiny_llama(VOCAB, 0).double())
    batch = make_batch()
    with torch.no_grad():
        whole = forward(policy, batch, SIZE, with_entropy=True)
    for size in (1, 2, 3):
        part = ForwardSize(sequences=size, head_tokens=2)
        pieces = forward_in_pieces(policy, batch, part, Ranks(), dtype=torch.float64, with_entropy=True)
        assert torch.allclose(pieces.log_probs_BT, whole.log_probs_BT, atol=1e-12)
        assert torch.allclose(pieces.entropy_BT, whole.entropy_BT, atol=1e-12)
    assert not pieces.log_probs_BT.requires_grad
    assert torch.equal(pieces.log_probs_BT != 0, batch.response_mask_BT)


def test_a_forward_under_autocast_uses_the_weights_as_they_are_now():
    policy = TokenLogProbs(tiny_llama(VOCAB, 0))
    batch = make_batch()
    weight = policy.model.model.layers[0].mlp.down_proj.weight
    with torch.autocast("cpu", dtype=torch.bfloat16):
        before = forward(policy, batch, SIZE).log_probs_BT
        with torch.no_grad():
            weight.add_(1.0)
        after = forward(policy, batch, SIZE).log_probs_BT
    with torch.autocast("cpu", dtype=torch.bfloat16):
        fresh = forward(policy, batch, SIZE).log_probs_BT
    assert torch.equal(after, fresh)
    assert not torch.allclose(before, after, atol=1e-2)


def lengths_batch(*lengths):
    return collate(
        [
            make_experience(key=(f"e{row}", 0), prompt_ids=(1,), response_ids=tuple(range(2, 1 + length)))
            for row, length in enumerate(lengths)
        ],
        step=0,
    )


@pytest.mark.parametrize(
    ("sequences", "tokens", "expected"),
    [
        (2, None, [[0, 1], [2, 3], [4, 5]]),  # in order
        (16, 12, [[4], [1], [0, 2, 3], [5]]),  # 9 | 8 | 3 × 4 = 12 | 2
        (2, 12, [[4], [1], [0, 2], [3, 5]]),  # both limits hold: no more than two sequences
        (16, 5, [[4], [1], [0], [2], [3], [5]]),  # a sequence above the limit runs alone
        (16, 99, [[4, 1, 0, 2, 3, 5]]),
    ],
)
def test_a_forward_holds_no_more_sequences_and_tokens_than_it_may(sequences, tokens, expected):
    batch = lengths_batch(4, 8, 4, 3, 9, 2)
    assert ForwardSize(sequences=sequences, tokens=tokens).cut(batch) == expected


def test_rows_without_a_response_are_in_no_piece():
    assert ForwardSize(sequences=3).cut(make_batch()) == [[0, 2, 3]]
    assert ForwardSize(sequences=3, tokens=100).cut(make_batch()) == [[3, 0, 2]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sequences": 0}, "micro_batch_size is 0"),
        ({"sequences": 1, "tokens": 0}, "micro_batch_tokens is 0; allowed: at least 1"),
        ({"sequences": 1, "head_tokens": 0}, "logprob_chunk_size is 0"),
    ],
)
def test_sizes_below_1_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        ForwardSize(**options)


def test_two_ranks_put_together_what_one_would_say():
    """The sum over ranks is taken by hand: one after the other, each with its own pieces and padding."""
    policy = TokenLogProbs(tiny_llama(VOCAB, 0).double())
    batch = make_batch()
    whole = forward_in_pieces(policy, batch, SIZE, Ranks(), dtype=torch.float64, with_entropy=True)
    calls = []

    def counted(*args, **kwargs):
        calls.append(args[0].shape)
        return policy(*args, **kwargs)

    parts = [
        forward_in_pieces(
            counted, batch, ForwardSize(sequences=1), Ranks(rank=rank, size=2), dtype=torch.float64, with_entropy=True
        )
        for rank in range(2)
    ]
    assert torch.allclose(sum(part.log_probs_BT for part in parts), whole.log_probs_BT, atol=1e-12)
    assert torch.allclose(sum(part.entropy_BT for part in parts), whole.entropy_BT, atol=1e-12)
    assert [shape[0] for shape in calls] == [1, 1, 1, 1]  # three rows, and one sequence of padding
    assert calls[-1] == (1, 2)


def test_padding_is_a_sequence_like_any_other_at_the_temperature_of_the_batch():
    batch = padding(make_batch())
    assert batch.temperature == 0.7
    assert batch.response_mask_BT.tolist() == [[False, True]]
    assert batch.attention_mask_BT.all()
