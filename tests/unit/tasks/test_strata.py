"""Even dealing."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_mappa.tasks.strata import dealt, draw, stratified_batch

STRATA = st.lists(st.sampled_from("abcde"), min_size=1, max_size=60)


@given(STRATA, st.text(max_size=3))
def test_every_beginning_holds_each_stratum_in_its_share(strata, seed):
    order = dealt(strata, seed=seed)
    assert sorted(order) == list(range(len(strata)))
    size, taken = Counter(strata), Counter()
    for place, index in enumerate(order, start=1):
        taken[strata[index]] += 1
        for stratum, count in size.items():
            assert abs(taken[stratum] - Fraction(count * place, len(strata))) < 1


@given(STRATA, st.integers(0, 3), st.data())
def test_a_draw_is_without_return_seeded_and_in_shares(strata, seed, data):
    count = data.draw(st.integers(1, len(strata)))
    chosen = draw(strata, count, seed=seed)
    assert chosen == draw(strata, count, seed=seed)
    assert chosen == sorted(set(chosen))
    assert len(chosen) == count
    of = Counter(strata[index] for index in chosen)
    assert all(abs(of[s] - Fraction(n * count, len(strata))) < 1 for s, n in Counter(strata).items())


def test_other_seeds_draw_others():
    strata = ["x"] * 50
    assert len({tuple(draw(strata, 10, seed=seed)) for seed in range(20)}) == 20
    counts = Counter(index for seed in range(400) for index in draw(strata, 10, seed=seed))
    assert min(counts.values()) > 40  # 80 each on average
    assert max(counts.values()) < 130


def test_batches_are_balanced_cover_everything_and_need_no_cursor():
    strata = ["easy"] * 6 + ["middle"] * 12 + ["hard"] * 6
    batches = [stratified_batch(strata, seed=3, step=step, batch_size=4) for step in range(12)]
    for batch in batches:
        assert Counter(strata[index] for index in batch) == {"easy": 1, "middle": 2, "hard": 1}
    assert sorted(index for batch in batches[:6] for index in batch) == list(range(24))
    assert sorted(index for batch in batches[6:] for index in batch) == list(range(24))
    assert batches[:6] != batches[6:]
    # A run that goes on at step 9 deals what the uninterrupted one did.
    assert stratified_batch(strata, seed=3, step=9, batch_size=4) == batches[9]
    assert stratified_batch(strata, seed=4, step=9, batch_size=4) != batches[9]


@pytest.mark.parametrize("batch_size", [1, 5, 7, 30])
def test_batches_reach_into_the_next_pass(batch_size):
    strata = list("aabbb")
    flat = [i for step in range(4) for i in stratified_batch(strata, seed=0, step=step, batch_size=batch_size)]
    for start in range(0, len(flat) - 4, 5):
        assert sorted(flat[start : start + 5]) == list(range(5))
