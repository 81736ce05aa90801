r"""Who decides whether an answer is right: code, by one rule per form of answer, and never a model.

A verifier reads the text of the final agent, and only what stands in its last `\boxed{}`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from lightning_mappa.errors import ConfigError
from lightning_mappa.tasks.grading import boxed_answer, grade_integer, integer_answer, parse_gold


class RulingStatus(StrEnum):
    RIGHT = "right"
    WRONG = "wrong"
    NO_ANSWER = "no_answer"
    NO_REFERENCE = "no_reference"
    TOO_LONG = "too_long"
    """The answer is longer than any that is compared."""
    TIMEOUT = "timeout"
    """Comparing the answer took longer than the limit."""
    CRASHED = "crashed"
    """Comparing the answer ended the process that did it, or failed in it."""
    BAD_REFERENCE = "bad_reference"
    """The reference cannot be read: nothing is said of the answer."""
    UNAVAILABLE = "unavailable"
    """The verifier itself does not start: nothing is said of the answer."""


NOT_GRADED = frozenset({RulingStatus.NO_REFERENCE, RulingStatus.BAD_REFERENCE, RulingStatus.UNAVAILABLE})
"""Not the answer's doing. Everything else that is not right is wrong: an answer that breaks or stalls its
verifier would otherwise be better than a wrong one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ruling:
    status: RulingStatus
    detail: str = ""
    """One printable line."""

    @property
    def value(self) -> float | None:
        """1.0 right, 0.0 wrong, None where nothing can be said of the answer."""
        if self.status in NOT_GRADED:
            return None
        return float(self.status is RulingStatus.RIGHT)


class Verifier(Protocol):
    """For one form of answer. Never blocks for longer than a limit of its own."""

    def reference(self, raw: object) -> str:
        """A reference as it is stored. Raises `ValueError` for one that is not of this form."""
        ...

    def answer(self, text: str) -> str | None:
        """The final answer in `text`, normalised as far as equal answers have equal texts; None without one."""
        ...

    def grade(self, answer: str | None, reference: str) -> Ruling: ...


class IntegerVerifier:
    """Whole numbers, as of AIME (`low` 0, `high` 999) and AMC 12 in the form of AI-MO (any sign and size).

    A reference may hold alternatives: `080 or 081 (both were accepted)`.
    """

    def __init__(self, low: int | None = None, high: int | None = None) -> None:
        self._low, self._high = low, high

    def reference(self, raw: object) -> str:
        gold = sorted(parse_gold(raw))
        outside = [n for n in gold if not self._allows(n)]
        if outside:
            raise ValueError(f"{raw!r} is not a whole number from {self._low} to {self._high}")
        return " or ".join(map(str, gold))

    def answer(self, text: str) -> str | None:
        return integer_answer(text)

    def grade(self, answer: str | None, reference: str) -> Ruling:
        if answer is None:
            return Ruling(status=RulingStatus.NO_ANSWER)
        right = grade_integer(answer, parse_gold(reference)) == 1.0
        return Ruling(status=RulingStatus.RIGHT if right else RulingStatus.WRONG)

    def _allows(self, number: int) -> bool:
        return (self._low is None or number >= self._low) and (self._high is None or number <= self._high)


_LAYOUT = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mathbb|bf|rm)\b|[{}$~\s]|\\[,;:! ]")
_CHOICE = re.compile(r"\(?([A-Za-z])\)?[.:]?")
_CHOICE_AND_TEXT = re.compile(r"\(([A-Za-z])\).*", re.DOTALL)
_SAID = re.compile(r"\b(?:final\s+)?answer\b\s*(?:is|:|=)*[\s$*]*\(?\s*([A-Za-z])\s*\)?(?![A-Za-z0-9])", re.IGNORECASE)


class LetterVerifier:
    r"""One letter of a choice: `\boxed{B}`, `\boxed{\textbf{(B)}\ 7}`, and without a box `Answer: (B)`.

    A letter in parentheses may be followed by the text of the choice; a bare letter may not, because `\boxed{Bx}`
    is an expression.
    """

    def __init__(self, letters: str = "ABCDE") -> None:
        if not letters.isascii() or not letters.isalpha() or len(set(letters.upper())) != len(letters):
            raise ConfigError(f"letters={letters!r}: give each letter of the choices once, such as ABCDE")
        self._letters = letters.upper()

    def reference(self, raw: object) -> str:
        letter = self._letter(raw) if isinstance(raw, str) else None
        if letter is None:
            raise ValueError(f"{raw!r} is not one of the letters {self._letters}")
        return letter

    def answer(self, text: str) -> str | None:
        boxed = boxed_answer(text)
        if boxed is not None:
            return self._letter(boxed)
        said = _SAID.findall(text)
        return self._letter(said[-1]) if said else None

    def grade(self, answer: str | None, reference: str) -> Ruling:
        if answer is None:
            return Ruling(status=RulingStatus.NO_ANSWER)
        return Ruling(status=RulingStatus.RIGHT if answer == reference else RulingStatus.WRONG)

    def _letter(self, text: str) -> str | None:
        plain = _LAYOUT.sub("", text)
        found = _CHOICE.fullmatch(plain) or _CHOICE_AND_TEXT.fullmatch(plain)
        letter = found[1].upper() if found else None
        return letter if letter is not None and letter in self._letters else None
