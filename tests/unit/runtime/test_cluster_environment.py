import pytest

from lightning_mappa.runtime.cluster_environment import ExternalRanks


def test_every_rank_is_a_node_with_one_device():
    ranks = ExternalRanks(2, 4, "10.0.0.1", 1234)
    assert ranks.creates_processes_externally
    assert (ranks.global_rank(), ranks.world_size(), ranks.node_rank(), ranks.local_rank()) == (2, 4, 2, 0)
    assert (ranks.main_address, ranks.main_port) == ("10.0.0.1", 1234)


def test_it_is_never_found_by_itself_and_never_renumbered():
    ranks = ExternalRanks(1, 2, "127.0.0.1", 1234)
    ranks.set_world_size(2)
    ranks.set_global_rank(0)
    assert ranks.global_rank() == 1
    assert not ExternalRanks.detect()
    with pytest.raises(ValueError, match="3 ranks, 2 were started"):
        ranks.set_world_size(3)
