r"""Integer answers: what stands in the last `\boxed{}`, and whether it is the right number.

The rules are narrow on purpose. A percent sign, a unit, a decimal point or an expression is no integer, so
a lenient reading never makes an answer right, and nothing is ever evaluated, so no answer is expensive.
"""

from __future__ import annotations

import math
import re

MAX_DIGITS = 18
_BOX = re.compile(r"\\f?box(?:ed)?\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\s*\{([^{}]*)\}")
_SPACE = re.compile(r"(?:\\[,;: ]|[~\s])+")
_INTEGER = re.compile(r"([+-]?) ?([0-9]+|[0-9]{1,3}(?:[, ][0-9]{3})+)")
_GOLD = re.compile(rf"([+-]?[0-9]{{1,{MAX_DIGITS}}})(?:\.0*)?(?:\^\\circ)?")


def boxed_answer(text: str) -> str | None:
    r"""The content of the last `\boxed{}` or `\fbox{}`, stripped; None without one that is closed."""
    start = None
    for box in _BOX.finditer(text):
        start = box.end()
    if start is None:
        return None
    depth = 1
    for brace in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return text[start : brace.start()].strip()
    return None


def integer_answer(text: str) -> str | None:
    r"""The integer in the last `\boxed{}` in its plainest form; None when it holds none."""
    boxed = boxed_answer(text)
    value = None if boxed is None else parse_integer(boxed)
    return None if value is None else str(value)


def parse_integer(text: str) -> int | None:
    r"""The integer that `text` is, or None.

    Dollar signs, outer spaces, `\text{}`, braces around the whole, a comma or space between thousands and
    leading zeros are allowed; digits are ASCII, at most `MAX_DIGITS`.
    """
    text = _TEXT.sub(r"\1", text).replace("$", "").replace(r"\!", "").replace("{,}", ",").replace("−", "-")  # noqa: RUF001
    text = _SPACE.sub(" ", text).strip()
    while text.startswith("{") and text.endswith("}"):
        text = text[1:-1].strip()
    match = _INTEGER.fullmatch(text)
    digits = re.sub("[, ]", "", match[2]) if match else ""
    return int(match[1] + digits) if match and len(digits) <= MAX_DIGITS else None


def parse_gold(value: object) -> frozenset[int]:
    r"""The integers that are right by a reference such as `60`, `142.0`, `"336^\circ"`, `"80 or 81 (both)"`.

    Raises `ValueError` where a reference is not a whole number of at most `MAX_DIGITS` digits.
    """
    text = value if isinstance(value, str) else ""
    if isinstance(value, float) and math.isfinite(value) and value.is_integer():
        text = str(int(value))
    elif isinstance(value, int) and not isinstance(value, bool):
        text = str(value)
    without_remark = re.sub(r"\([^()]*\)\s*$", "", text).replace("$", "").strip()
    matches = [_GOLD.fullmatch(part) for part in re.split(r"\s+or\s+", without_remark)]
    numbers = [int(match[1]) for match in matches if match]
    if len(numbers) != len(matches):
        raise ValueError(f"{value!r} is not a whole number")
    return frozenset(numbers)


def grade_integer(answer: str | None, gold: frozenset[int]) -> float:
    """1.0 when `answer` (the content of a box) is one of the integers in `gold`, else 0.0."""
    return 0.0 if answer is None else float(parse_integer(answer) in gold)
