from hypothesis import given
from hypothesis import strategies as st

from lightning_mappa.seeds import derive_seed


def test_a_seed_is_the_same_everywhere():
    assert derive_seed(0, "train") == 5189347558431273


def test_parts_are_told_apart_by_place_and_type():
    seeds = [derive_seed(*parts) for parts in [(1, 2), (12,), ("1", 2), ("12",), (2, 1), ("1", "2"), ("1,2",), ()]]
    assert len(set(seeds)) == len(seeds)


@given(st.lists(st.integers() | st.text()))
def test_a_seed_is_exact_as_a_json_number(parts):
    assert 0 <= derive_seed(*parts) < 2**53
