"""Ranks that somebody else has started, as Lightning sees them."""

from __future__ import annotations

from lightning.pytorch.plugins.environments import ClusterEnvironment
from typing_extensions import override


class ExternalRanks(ClusterEnvironment):
    """One process per rank, each with at most one device that it can see.

    For Lightning every rank is a node of its own with one device: `Trainer(devices=1, num_nodes=world_size)`.
    So it never counts the devices of others, and its device is always the first one visible.

    Args:
        rank: of this process, from 0.
        main_address: of the machine of rank 0.
        main_port: a free port there.
    """

    def __init__(self, rank: int, world_size: int, main_address: str, main_port: int) -> None:
        super().__init__()
        self._rank = rank
        self._world_size = world_size
        self._main_address = main_address
        self._main_port = main_port

    @property
    @override
    def creates_processes_externally(self) -> bool:
        return True

    @property
    @override
    def main_address(self) -> str:
        return self._main_address

    @property
    @override
    def main_port(self) -> int:
        return self._main_port

    @staticmethod
    @override
    def detect() -> bool:
        """Never found by itself: it is given to the Trainer."""
        return False

    @override
    def world_size(self) -> int:
        return self._world_size

    @override
    def set_world_size(self, size: int) -> None:
        """Known from the start. Raises `ValueError` when the Trainer was given another number."""
        if size != self._world_size:
            raise ValueError(f"the Trainer has {size} ranks, {self._world_size} were started")

    @override
    def global_rank(self) -> int:
        return self._rank

    @override
    def set_global_rank(self, rank: int) -> None:
        pass

    @override
    def local_rank(self) -> int:
        return 0

    @override
    def node_rank(self) -> int:
        return self._rank
