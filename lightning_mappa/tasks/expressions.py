"""The value of an integer expression such as `(12+7)*3`, without `eval`."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable

MAX_LENGTH = 200
"""Characters; bounds recursion and the size of every intermediate number."""

_ALPHABET = re.compile(r"[0-9+\-*/() ]+")
_BINARY: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}
_UNARY: dict[type[ast.unaryop], Callable[[int], int]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


def evaluate(text: str) -> int:
    """The value of an expression of integers, `+ - * //`, signs and parentheses; outer spaces are ignored.

    Raises `ValueError` with a one-line reason for anything else, a division by zero included.
    """
    source = text.strip()
    if len(source) > MAX_LENGTH or not _ALPHABET.fullmatch(source):
        raise ValueError(f"not an integer expression: {source[:40]!r}")
    try:
        tree = ast.parse(source, mode="eval")
    except (SyntaxError, MemoryError, RecursionError):
        raise ValueError(f"not an integer expression: {source[:40]!r}") from None
    return _value(tree.body)


def _value(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int() as value):
            return value
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            return _UNARY[type(op)](_value(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            try:
                return _BINARY[type(op)](_value(left), _value(right))
            except ZeroDivisionError:
                raise ValueError("division by zero") from None
        case _:
            raise ValueError(f"not an integer expression: {ast.unparse(node)[:40]!r}")
