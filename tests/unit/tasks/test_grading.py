r"""What counts as an integer answer, case by case, and what must hold for every text."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_mappa.tasks.grading import boxed_answer, grade_integer, parse_gold, parse_integer


def read(text: str) -> int | None:
    boxed = boxed_answer(text)
    return None if boxed is None else parse_integer(boxed)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        # Cases on which lenient graders go wrong.
        (r"\boxed{70\%}", None),
        (r"\boxed{7000\%}", None),
        (r"\boxed{m+n=70}", None),
        (r"\boxed{\{70\}}", None),
        (r"\boxed{70 cm}", None),
        (r"\boxed{70\text{ cm}}", None),
        (r"\boxed{70°}", None),
        (r"\boxed{70^\circ}", None),
        (r"\boxed{(1,2)}", None),
        (r"\boxed{\{1,2\}}", None),
        (r"\boxed{1,2}", None),
        (r"\boxed{33}, wait, \boxed{27}", 27),
        (r"\boxed{70 or 71}", None),
        ("70 or 71", None),
        ("$70$ is wrong; the answer is $71$", None),
        (r"\boxed{70", None),
        (r"\boxed{33}, no, \boxed{27", None),
        (r"\fbox{70}", 70),
        (r"\boxed{７０}", None),  # noqa: RUF001
        (r"\boxed{1e3}", None),
        (r"\boxed{(B)}", None),
        ("Answer: (B)", None),
        (r"\boxed{9^{9^{9^9}}}", None),
        # Ways to write one integer.
        (r"\boxed{70}", 70),
        (r"\boxed {70}", 70),
        (r"so $\boxed{ 070 }$.", 70),
        (r"\boxed{$70$}", 70),
        (r"\boxed{\text{70}}", 70),
        (r"\boxed{{70}}", 70),
        (r"\boxed{\boxed{70}}", 70),
        (r"\boxed{-4}", -4),
        (r"\boxed{- 4}", -4),
        (r"\boxed{−4}", -4),  # noqa: RUF001
        (r"\boxed{+4}", 4),
        (r"\boxed{-0}", 0),
        (r"\boxed{338551}", 338551),
        (r"\boxed{338,551}", 338551),
        (r"\boxed{338{,}551}", 338551),
        (r"\boxed{338\,551}", 338551),
        (r"\boxed{338,\!551}", 338551),
        # And no integer at all.
        (r"\boxed{}", None),
        (r"\boxed{\frac{1}{2}}", None),
        (r"\boxed{142.0}", None),
        (r"\boxed{3 4}", None),
        (r"\boxed{70}{", 70),
        (r"\boxed{\frac{140}{2}} = 70", None),
        (r"\boxed 70", None),
        ("", None),
    ],
)
def test_integer_answers(text, number):
    assert read(text) == number


def test_box_content_keeps_nested_and_escaped_braces():
    assert boxed_answer(r"\boxed{\frac{1}{2}} then") == r"\frac{1}{2}"
    assert boxed_answer(r"\boxed{\{70} x") == r"\{70"
    assert boxed_answer(r"\boxed{a \} b}") == r"a \} b"


@pytest.mark.parametrize(
    "text",
    [r"\boxed{" + "9^{" * 50_000, r"\boxed{" * 50_000, r"\boxed{" + "1," * 50_000 + "}", "{" * 100_000],
)
def test_hostile_answers_cost_nothing(text):
    start = time.perf_counter()
    assert read(text) is None
    assert time.perf_counter() - start < 1.0


def test_more_digits_than_any_answer_has_are_no_answer():
    assert parse_integer("9" * 18) == int("9" * 18)
    assert parse_integer("9" * 19) is None
    assert parse_integer("9" * 10_000) is None


@pytest.mark.parametrize(
    ("value", "gold"),
    [
        ("60", {60}),
        ("007", {7}),
        (60, {60}),
        (142.0, {142}),
        ("142.0", {142}),
        (-4.0, {-4}),
        ("-4.0", {-4}),
        (338551.0, {338551}),
        ("080 or 081 (both were accepted)", {80, 81}),
        ("80 or 81", {80, 81}),
        (r"336^\circ", {336}),
        ("$12$", {12}),
    ],
)
def test_references(value, gold):
    assert parse_gold(value) == frozenset(gold)


@pytest.mark.parametrize(
    "value",
    [None, True, 0.5, float("nan"), float("inf"), 1e300, "", "B", "1/2", "80 or B", "70%", [3], "７"],  # noqa: RUF001
)
def test_references_that_are_no_whole_number_are_refused(value):
    with pytest.raises(ValueError, match="is not a whole number"):
        parse_gold(value)


def test_any_alternative_is_right_and_no_answer_is_wrong():
    gold = parse_gold("080 or 081 (both were accepted)")
    grades = [grade_integer(answer, gold) for answer in ("80", "081", "82", "", None)]
    assert grades == [1.0, 1.0, 0.0, 0.0, 0.0]


@given(st.integers(-(10**18) + 1, 10**18 - 1), st.text())
def test_a_boxed_integer_is_read_back_after_any_text(number, before):
    assert read(f"{before}\n\\boxed{{{number}}}") == number


@given(st.integers(-(10**18) + 1, 10**18 - 1))
def test_grouped_digits_are_the_same_number(number):
    assert parse_integer(f"{number:,}") == number


@given(st.text())
def test_only_signs_digits_and_layout_make_a_number(text):
    if parse_integer(text) is not None:
        assert any(character in "0123456789" for character in text)
        assert not any(character in "%^/.*=()[]°" for character in text)


@given(st.text(alphabet="\\boxedf{}0123,. "))
def test_every_text_reads_as_an_integer_or_as_nothing(text):
    assert read(text) is None or isinstance(read(text), int)


@given(st.integers(0, 10**17))
def test_references_in_any_form_agree(number):
    assert parse_gold(number) == parse_gold(str(number)) == parse_gold(f"{number}.0") == frozenset({number})
