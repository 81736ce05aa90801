"""Problems that are in two splits."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_mappa.errors import ConfigError
from lightning_mappa.tasks.leaks import N, find_leaks, fingerprint, normalised, refuse_leaks
from tests.unit.tasks.leak_hashes import SETS, hashed, load

LONG = "A farmer has twelve sheep and buys seven more of them at the market on a day"


def found(first: str, second: str, **settings):
    return find_leaks({"train": {"a": fingerprint(first)}, "report": {"b": fingerprint(second)}}, **settings)


def test_layout_case_and_signs_make_no_other_problem():
    assert normalised("Find  $x^2 + 1$.\n(An INTEGER)") == "find x ^ 2 + 1 an integer"
    (leak,) = found("Let $x$ be 3. Find $x^2$!", "let x be $3$; find  x^{2}")
    assert leak.exact
    assert str(leak) == "train/a and report/b (the same text)"


def test_containment_by_hand():
    words = LONG.split()
    assert len(words) == 17  # ten runs of eight words
    five_shared = " ".join([*words[:12], "yesterday", "evening", "with", "his", "son"])
    (leak,) = found(LONG, five_shared)
    assert leak.containment == pytest.approx(5 / 10)
    assert not leak.exact
    assert "50% of the 8-grams" in str(leak)
    assert found(LONG, " ".join([*words[:11], "yesterday", "evening", "with", "his", "son", "again"])) == []
    assert len(found(LONG, five_shared, max_containment=0.4)) == 1
    assert found(LONG, five_shared, max_containment=None) == []


def test_a_problem_inside_a_longer_one_is_contained_whole():
    inside = " ".join(LONG.split()[2:14])
    (leak,) = found(inside, LONG + " and then " + LONG.upper()[::-1])
    assert leak.containment == 1.0
    assert not leak.exact


def test_short_problems_are_compared_whole():
    assert normalised("What is 2 + 2?") == "what is 2 + 2"
    assert N > 4
    assert found("What is 2 + 2?", "what is 2+2")[0].exact
    assert found("What is 2 + 2?", "What is 2 + 3?") == []
    assert found("What is 2 + 2?", "What is 2 - 2?") == []


def test_within_a_split_nothing_leaks_and_every_pair_of_splits_is_looked_at():
    one, other = fingerprint("What is 2 + 2?"), fingerprint("What is 3 + 3?")
    splits = {"train": {"a": one, "b": one}, "selection": {"c": other}, "report": {"d": other, "e": one}}
    assert [(leak.first, leak.second) for leak in find_leaks(splits)] == [
        ("train/a", "report/e"),
        ("train/b", "report/e"),
        ("selection/c", "report/d"),
    ]


def test_the_run_stops_and_the_pairs_are_listed():
    texts = [(str(i), f"What is {i} + {i}?") for i in range(25)]
    with pytest.raises(ConfigError) as caught:
        refuse_leaks({"train": texts, "report": texts})
    message = str(caught.value)
    assert "25 pairs of problems are in two splits" in message
    assert "train/0 and report/0 (the same text)" in message
    assert "… and 5 more" in message
    refuse_leaks({"train": texts[:12], "report": texts[12:]})


WORDS = st.lists(st.sampled_from("abc"), min_size=1, max_size=14)


@given(
    st.lists(WORDS, min_size=1, max_size=4), st.lists(WORDS, min_size=1, max_size=4), st.sampled_from([0.3, 0.5, 1.0])
)
def test_every_pair_is_found_that_a_look_at_all_of_them_finds(ours, theirs, threshold):
    sides = [{str(i): fingerprint(" ".join(words)) for i, words in enumerate(side)} for side in (ours, theirs)]
    pairs = []
    for our_id, one in sides[0].items():
        for their_id, other in sides[1].items():
            shared = len(one.grams & other.grams) / min(len(one.grams), len(other.grams))
            if shared >= threshold or one.text == other.text:
                pairs.append((f"train/{our_id}", f"report/{their_id}"))
    splits = {"train": sides[0], "report": sides[1]}
    assert [(leak.first, leak.second) for leak in find_leaks(splits, max_containment=threshold)] == pairs


def test_an_opening_that_all_problems_have_costs_nothing():
    rng = random.Random(0)
    opening = "find the number of positive integers less than"

    def prints(count):
        return {
            str(i): fingerprint(f"{opening} {' '.join(str(rng.randrange(10**6)) for _ in range(30))}")
            for i in range(count)
        }

    splits = {"train": prints(2000), "report": prints(300)}
    start = time.perf_counter()
    assert find_leaks(splits) == []
    assert time.perf_counter() - start < 3


# -- a published overlap ----------------------------------------------------------------------------------------


def overlap(prints):
    train, held_out = (prints[name] for name in SETS)
    leaks = find_leaks({"train": train, "eval": held_out})
    return leaks, {name: len(group) for name, group in prints.items()}


def check_published(leaks, sizes):
    assert sizes == {"AIME_1983_2024": 933, "aime_eval_32": 32}
    assert len(leaks) == 18
    assert sum(leak.exact for leak in leaks) == 16
    assert len({leak.second for leak in leaks}) == 18
    assert min(leak.containment for leak in leaks) >= 0.9


def test_the_published_evaluation_set_has_18_problems_of_its_training_set():
    check_published(*overlap(load()))


FOLDER = os.environ.get("MAPPA_MATH_DATA", "")


@pytest.mark.skipif(not FOLDER, reason="MAPPA_MATH_DATA names no folder with the original files")
def test_the_hashes_are_those_of_the_files():
    originals = {name: hashed(Path(FOLDER) / f"{name}.json") for name in SETS}
    assert originals == load()
    check_published(*overlap(originals))
