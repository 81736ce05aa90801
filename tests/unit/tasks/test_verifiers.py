r"""The cases on which graders of mathematics go wrong, under every rule."""

from __future__ import annotations

import contextlib

import pytest

from lightning_mappa.errors import ConfigError
from lightning_mappa.tasks.free_form import FreeFormVerifier
from lightning_mappa.tasks.verifiers import IntegerVerifier, LetterVerifier, Ruling, RulingStatus, Verifier
from tests.packages import needs

RIGHT, WRONG, NONE = RulingStatus.RIGHT, RulingStatus.WRONG, RulingStatus.NO_ANSWER


@pytest.fixture(scope="module")
def verifiers():
    found: dict[str, Verifier] = {"aime": IntegerVerifier(0, 999), "amc": IntegerVerifier(), "letter": LetterVerifier()}
    with contextlib.suppress(ConfigError):
        found["free"] = FreeFormVerifier(limit_s=2.0)
    yield found
    if "free" in found:
        found["free"].close()


def status(verifier: Verifier, text: str, gold: object) -> RulingStatus:
    return verifier.grade(verifier.answer(text), verifier.reference(gold)).status


# -- what lenient graders get wrong (reference 70 unless said otherwise) ----------------------------------------

CASES = [
    # text, reference, integer rule, free form
    (r"\boxed{70\%}", "70", NONE, WRONG),  # 70/100
    (r"\boxed{7000\%}", "70", NONE, RIGHT),
    (r"\boxed{m+n=70}", "70", NONE, RIGHT),
    (r"\boxed{\{70\}}", "70", NONE, RIGHT),
    (r"\boxed{70 cm}", "70", NONE, RIGHT),
    (r"\boxed{70\text{ cm}}", "70", NONE, RIGHT),
    (r"\boxed{70^\circ}", "70", NONE, RIGHT),
    (r"\boxed{33}, wait, \boxed{27}", "27", RIGHT, RIGHT),  # joined to a set by math-verify alone
    (r"\boxed{27}, wait, \boxed{33}", "27", WRONG, WRONG),
    ("70 or 71", "71", NONE, NONE),
    (r"\boxed{70 or 71}", "71", NONE, WRONG),
    ("`$70$` is wrong; the answer is `$71$`", "71", NONE, NONE),
    (r"\boxed{70", "70", NONE, NONE),
    (r"\fbox{70}", "70", RIGHT, RIGHT),
    (r"\boxed{７０}", "70", NONE, WRONG),  # noqa: RUF001
    (r"\boxed{1e3}", "1000", NONE, WRONG),
    (r"\boxed{070}", "70", RIGHT, RIGHT),
    (r"\boxed{$70$}", "70", RIGHT, RIGHT),
    (r"\boxed{1,000}", "1000", RIGHT, RIGHT),
    ("", "70", NONE, NONE),
]


@pytest.mark.parametrize(("text", "gold", "expected"), [(t, g, i) for t, g, i, _ in CASES])
def test_the_integer_rule(verifiers, text, gold, expected):
    assert status(verifiers["amc"], text, gold) is expected


@needs("math_verify")
@pytest.mark.parametrize(("text", "gold", "expected"), [(t, g, f) for t, g, _, f in CASES])
def test_the_free_form_rule(verifiers, text, gold, expected):
    assert status(verifiers["free"], text, gold) is expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"\boxed{B}", RIGHT),
        (r"\boxed{(B)}", RIGHT),
        ("Answer: (B)", RIGHT),
        ("The answer is **B**.", RIGHT),
        ("the final answer is $B$", RIGHT),
        (r"\boxed{\textbf{(B)}\ 7}", RIGHT),
        (r"\boxed{\text{(B) }\frac{1}{2}}", RIGHT),
        (r"\boxed{\text{B}}", RIGHT),
        (r"\boxed{\textbf{B.}}", RIGHT),
        (r"\boxed{b}", RIGHT),
        (r"Answer: (A). No: \boxed{B}", RIGHT),
        ("Answer: A. Wait. Answer: B", RIGHT),
        (r"\boxed{A}", WRONG),
        ("Answer: (C)", WRONG),
        (r"\boxed{F}", NONE),  # no choice
        (r"\boxed{AB}", NONE),
        (r"\boxed{Bx}", NONE),
        (r"\boxed{B \text{ or } C}", NONE),
        (r"\boxed{7}", NONE),
        ("Answer: Because", NONE),
        ("B", NONE),
        ("", NONE),
    ],
)
def test_the_letter_rule(verifiers, text, expected):
    assert status(verifiers["letter"], text, "B") is expected


@needs("math_verify")
@pytest.mark.parametrize(
    ("answer", "gold", "expected"),
    [
        (r"\frac{2}{4}", r"\frac12", RIGHT),
        ("0.5", r"\frac{1}{2}", RIGHT),
        (r"50\%", r"\frac{1}{2}", RIGHT),
        (r"50\%", r"50\%", RIGHT),
        ("50", r"50\%", WRONG),
        (r"2\sqrt2", r"\sqrt{8}", RIGHT),
        ("(x+1)^2", "x^2+2x+1", RIGHT),
        ("x^2+1", "x^2+2x+1", WRONG),
        (r"\text{Evelyn}", "Evelyn", RIGHT),
        ("(1,2)", "(1,2]", WRONG),
        ("(1,2)", r"\{1,2\}", RIGHT),  # an interval is taken for a set
        (r"\{1,2\}", "(1,2)", RIGHT),
        ("3.14", r"\pi", WRONG),
        (r"\frac{", "1", WRONG),
        ("(B)", "B", RIGHT),
    ],
)
def test_expressions(verifiers, answer, gold, expected):
    assert status(verifiers["free"], rf"so \boxed{{{answer}}}", gold) is (NONE if answer == r"\frac{" else expected)


# -- references -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "raw", "stored"),
    [
        ("aime", "080 or 081 (both were accepted)", "80 or 81"),
        ("aime", "007", "7"),
        ("amc", 142.0, "142"),
        ("amc", -4.0, "-4"),
        ("amc", 338551.0, "338551"),
        ("letter", "B", "B"),
        ("letter", r"\textbf{(e)}", "E"),
        pytest.param("free", r" \frac12 ", r"\frac12", marks=needs("math_verify")),
        pytest.param("free", 3, "3", marks=needs("math_verify")),
    ],
)
def test_references_as_they_are_stored(verifiers, name, raw, stored):
    assert verifiers[name].reference(raw) == stored


@pytest.mark.parametrize(
    ("name", "raw", "message"),
    [
        ("aime", 1000, "not a whole number from 0 to 999"),
        ("aime", "-1", "not a whole number from 0 to 999"),
        ("amc", "B", "not a whole number"),
        ("amc", 0.5, "not a whole number"),
        ("letter", "F", "not one of the letters ABCDE"),
        ("letter", 2, "not one of the letters ABCDE"),
        pytest.param("free", " ", "not an answer", marks=needs("math_verify")),
        pytest.param("free", None, "not an answer", marks=needs("math_verify")),
    ],
)
def test_references_of_another_form_are_refused(verifiers, name, raw, message):
    with pytest.raises(ValueError, match=message):
        verifiers[name].reference(raw)


def test_alternatives_are_both_right(verifiers):
    gold = "080 or 081 (both were accepted)"
    assert [status(verifiers["aime"], rf"\boxed{{{n}}}", gold) for n in (80, "081", 82)] == [RIGHT, RIGHT, WRONG]


def test_signs_and_sizes_of_amc(verifiers):
    assert status(verifiers["amc"], r"\boxed{-4}", -4.0) is RIGHT
    assert status(verifiers["amc"], r"\boxed{4}", -4.0) is WRONG
    assert status(verifiers["amc"], r"\boxed{338{,}551}", 338551.0) is RIGHT


def test_what_counts_as_wrong_and_what_as_nothing():
    values = {status: Ruling(status=status).value for status in RulingStatus}
    assert values.pop(RulingStatus.RIGHT) == 1.0
    assert {status for status, value in values.items() if value is None} == {
        RulingStatus.NO_REFERENCE,
        RulingStatus.BAD_REFERENCE,
        RulingStatus.UNAVAILABLE,
    }
    assert {value for value in values.values() if value is not None} == {0.0}


@pytest.mark.parametrize("letters", ["", "AAB", "A-E", "É"])
def test_choices_that_are_no_letters_are_refused(letters):
    with pytest.raises(ConfigError, match="letters="):
        LetterVerifier(letters)
