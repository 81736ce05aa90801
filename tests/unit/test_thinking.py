import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_mappa.thinking import strip_thinking


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("plain", "plain"),
        ("<think>a</think>b", "b"),
        ("<THINK>a</Think>b", "b"),
        ("a<think>b</think>c<think>d</think>e", "ace"),
        ("a</think>\n\nb", "\n\nb"),
        ("a</think>b</think>c", "c"),
        ("<think>a</think>b</think>c", "c"),
        ("<think>a<think>b</think>c", "c"),
        ("a<think>b", "a"),
        ("<think>", ""),
        ("a</think>b<think>c", "b"),
        ("", ""),
    ],
)
def test_what_is_thinking(text, left):
    assert strip_thinking(text) == left


@given(st.lists(st.sampled_from(["<think>", "</think>", "x", "y "]), max_size=20))
def test_no_tag_survives_and_nothing_is_added(pieces):
    left = strip_thinking("".join(pieces))
    assert "think>" not in left
    assert strip_thinking(left) == left
