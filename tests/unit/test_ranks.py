import pytest
import torch

from lightning_mappa.ranks import Ranks


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("n_pieces", [0, 1, 2, 5, 8])
def test_every_piece_is_dealt_once_and_every_rank_runs_as_many(size, n_pieces):
    pieces = [[number] for number in range(n_pieces)]
    dealt = [Ranks(rank=rank, size=size).deal(pieces) for rank in range(size)]
    assert {len(own) for own in dealt} == {-(-n_pieces // size)}
    assert sorted(piece for own in dealt for piece in own if piece) == pieces
    if n_pieces:
        assert any(own[-1] for own in dealt)  # a last round in which nobody works would step on padding


def test_pieces_go_round_in_order():
    assert Ranks(rank=1, size=2).deal([[0], [1], [2], [3], [4]]) == [[1], [3], []]


def test_one_rank_adds_nothing_up():
    tensor = torch.ones(2)
    assert Ranks().total(tensor) is tensor
