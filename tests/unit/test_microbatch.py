import torch

from lightning_mappa.datamodules.collate import collate
from lightning_mappa.microbatch import ForwardSize, cut, forward, forward_in_pieces
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
