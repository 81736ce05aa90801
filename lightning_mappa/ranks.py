"""The processes that train one agent together, as the parts of a step see them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor


def _alone(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """Which of how many this process is, and how their tensors are added up."""

    rank: int = 0
    size: int = 1
    total: Callable[[Tensor], Tensor] = _alone
    """The sum over all ranks, the same to the last bit on each; a collective: every rank has to call it."""

    def deal(self, pieces: Sequence[Sequence[int]]) -> list[Sequence[int]]:
        """This rank's pieces, every `size`-th; as many for every rank, the last ones empty where there are too few."""
        own = [list(piece) for piece in pieces[self.rank :: self.size]]
        rounds = -(-len(pieces) // self.size)
        return [*own, *[[]] * (rounds - len(own))]
