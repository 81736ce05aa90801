"""Short English word problems with integer answers, in three bands of difficulty."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lightning_mappa.errors import ConfigError
from lightning_mappa.tasks.base import Split
from lightning_mappa.tasks.expressions import evaluate
from lightning_mappa.tasks.grading import integer_answer
from lightning_mappa.types import Task

BANDS = (1, 2, 3)
"""One operation; two operations; three operations with numbers up to three digits."""

MAX_CHARS = 76
# fmt: off
_NAMES = ["Ana", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hana", "Ivo", "Jo", "Kim", "Leo", "Mia", "Ned",
          "Ola", "Pam", "Raj", "Sue", "Tom", "Zoe"]
_THINGS = ["apples", "books", "cards", "coins", "cups", "eggs", "keys", "maps", "nuts", "pens", "plums",
           "rings", "shells", "stamps", "stones", "toys"]
_BOXES = ["bags", "boxes", "jars", "packs", "trays"]
# fmt: on
_SPLIT_OF_TENTH: tuple[Split, ...] = ("train",) * 6 + ("selection",) * 2 + ("report",) * 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A word problem and the expression that solves it."""

    text: str
    expression: str
    band: int

    @property
    def value(self) -> int:
        return evaluate(self.expression)

    @property
    def split(self) -> Split:
        """A function of the text alone: no seed can put one problem into two splits."""
        return _SPLIT_OF_TENTH[int(self.digest, 16) % len(_SPLIT_OF_TENTH)]

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()[:16]


class Arithmetic:
    """A seeded `TaskSource`; the bands take turns, so that every split holds them in equal parts."""

    def __init__(
        self,
        seed: int = 0,
        n_train: int = 2048,
        n_selection: int = 128,
        n_report: int = 512,
        bands: Sequence[int] = BANDS,
    ) -> None:
        unknown = [band for band in bands if band not in BANDS]
        if not bands or unknown:
            raise ConfigError(f"task.bands={list(bands)}: allowed is a non-empty choice of {list(BANDS)}")
        sizes: dict[Split, int] = {"train": n_train, "selection": n_selection, "report": n_report}
        for split, size in sizes.items():
            if size < 1:
                raise ConfigError(f"task.n_{split}={size}: must be at least 1")
        self._tasks = {split: _sample(split, size, seed, tuple(bands)) for split, size in sizes.items()}

    def tasks(self, split: Split) -> Sequence[Task]:
        return self._tasks[split]

    def answer(self, text: str) -> str | None:
        return integer_answer(text)

    def grade(self, task: Task, answer: str | None) -> float | None:
        if task.reference is None:
            return None
        return float(answer == task.reference)


def word_problem(rng: random.Random, band: int) -> Problem:
    """Draws one problem of `band`, from whatever split its text falls into."""
    while True:
        text, expression = rng.choice(_SHAPES[band])(rng, band)
        if len(text) <= MAX_CHARS:
            return Problem(text=text, expression=expression, band=band)


def _sample(split: Split, size: int, seed: int, bands: tuple[int, ...]) -> tuple[Task, ...]:
    rng = random.Random(f"arithmetic/{seed}/{split}")
    problems: dict[str, Problem] = {}
    while len(problems) < size:
        problem = word_problem(rng, bands[len(problems) % len(bands)])
        if problem.split == split:
            problems.setdefault(problem.text, problem)
    return tuple(
        Task(
            id=f"arithmetic-{problem.digest}",
            kind=f"arithmetic/{problem.band}",
            prompt=problem.text,
            reference=str(problem.value),
        )
        for problem in problems.values()
    )


def _number(rng: random.Random, band: int) -> int:
    return rng.randint(100, 999) if band == 3 and rng.random() < 0.5 else rng.randint(2, 99)


def _two_names(rng: random.Random) -> tuple[str, str]:
    first, second = rng.sample(_NAMES, 2)
    return first, second


def _opening(rng: random.Random, band: int, name: str) -> tuple[str, str]:
    """How a story starts: what `name` has, and the expression for it (one operation)."""
    things, boxes = rng.choice(_THINGS), rng.choice(_BOXES)
    a, b = rng.randint(2, 12), _number(rng, 1)
    c, d = _number(rng, band), _number(rng, band)
    return rng.choice(
        [
            (f"{name} has {a} {boxes} of {b} {things}", f"{a}*{b}"),
            (f"{name} fills {a} {boxes} with {b} {things} each", f"{a}*{b}"),
            (f"{name} has {c} red and {d} blue {things}", f"{c}+{d}"),
            (f"{name} has {c} {things} and buys {d} more", f"{c}+{d}"),
        ]
    )


def _begun(rng: random.Random, band: int, name: str, changes: int) -> tuple[str, str]:
    """An opening and so many changes: a story without its question."""
    text, expression = _opening(rng, band, name)
    for _ in range(changes):
        event, expression = _change(rng, band, expression)
        text = f"{text}, {event}"
    return text, expression


def _change(rng: random.Random, band: int, expression: str) -> tuple[str, str]:
    """Something gained or lost, and the expression after it; what is lost is less than what is there."""
    value = evaluate(expression)
    amount = _number(rng, band)
    if rng.random() < 0.5 or value < 4:
        return f"{rng.choice(['buys', 'finds', 'gets'])} {amount} more", f"{expression}+{amount}"
    if amount >= value:
        amount = rng.randint(2, value - 1)
    return f"{rng.choice(['gives away', 'loses', 'sells'])} {amount}", f"{expression}-{amount}"


def _divisor(rng: random.Random, value: int) -> int | None:
    divisors = [d for d in range(2, 13) if value % d == 0 and d < value]
    return rng.choice(divisors) if divisors else None


def _grouped(expression: str) -> str:
    """In parentheses where a following `*` or `//` would bind tighter."""
    return f"({expression})" if "+" in expression or "-" in expression else expression


def _one_sum(rng: random.Random, band: int) -> tuple[str, str]:
    name, other = _two_names(rng)
    a, b, things = _number(rng, band), _number(rng, band), rng.choice(_THINGS)
    text = rng.choice(
        [
            f"{name} has {a} {things} and {other} has {b}. How many in all?",
            f"{name} has {a} {things} and finds {b} more. How many now?",
            f"{name} buys {a} {things}, then {b} more. How many in all?",
            f"After {a} {things} {name} gets {b} more. How many now?",
        ]
    )
    return text, f"{a}+{b}"


def _one_difference(rng: random.Random, band: int) -> tuple[str, str]:
    name, other = _two_names(rng)
    b, a = sorted((_number(rng, band), _number(rng, band) + 1))
    a, things = a + (a == b), rng.choice(_THINGS)
    text = rng.choice(
        [
            f"{name} has {a} {things} and loses {b}. How many are left?",
            f"{name} gives away {b} of {a} {things}. How many are left?",
            f"{name} needs {a} {things} and has {b}. How many are missing?",
            f"{name} has {b} {things}, {other} has {a}. How many more has {other}?",
        ]
    )
    return text, f"{a}-{b}"


def _one_product(rng: random.Random, band: int) -> tuple[str, str]:
    name, other = _two_names(rng)
    a, b = rng.randint(2, 12), _number(rng, band)
    things, boxes = rng.choice(_THINGS), rng.choice(_BOXES)
    return rng.choice(
        [
            (f"{name} has {a} {boxes} of {b} {things}. How many {things}?", f"{a}*{b}"),
            (f"{name} packs {b} {things} in each of {a} {boxes}. How many {things}?", f"{b}*{a}"),
            (f"{name} has {b} {things}. {other} has {a} times as many. How many has {other}?", f"{b}*{a}"),
        ]
    )


def _one_quotient(rng: random.Random, band: int) -> tuple[str, str]:
    name, things, boxes = rng.choice(_NAMES), rng.choice(_THINGS), rng.choice(_BOXES)
    b = rng.randint(2, 12)
    a = b * rng.randint(2, 25)
    text = rng.choice(
        [
            f"{name} shares {a} {things} among {b} friends. How many each?",
            f"{name} puts {a} {things} in {b} equal {boxes}. How many in each?",
            f"{a} {things} go into {boxes} of {b}. How many {boxes}?",
        ]
    )
    return text, f"{a}//{b}"


def _story(rng: random.Random, band: int) -> tuple[str, str]:
    """An opening and `band - 1` changes: `a*b+c-d`."""
    text, expression = _begun(rng, band, rng.choice(_NAMES), changes=band - 1)
    return f"{text}. How many now?", expression


def _story_times(rng: random.Random, band: int) -> tuple[str, str]:
    """A shorter story, and somebody who has several times as many: `(a+b)*c`."""
    name, other = _two_names(rng)
    text, expression = _begun(rng, band, name, changes=band - 2)
    factor = rng.randint(2, 9)
    return f"{text}. {other} has {factor} times as many. How many?", f"{_grouped(expression)}*{factor}"


def _story_shared(rng: random.Random, band: int) -> tuple[str, str]:
    """A shorter story, then everything is shared without remainder: `(a+b)//c`."""
    while True:
        text, expression = _begun(rng, band, rng.choice(_NAMES), changes=band - 2)
        divisor = _divisor(rng, evaluate(expression))
        if divisor is not None:
            break
    return f"{text}. {divisor} friends share them. How many each?", f"{_grouped(expression)}//{divisor}"


_Shape = Callable[[random.Random, int], tuple[str, str]]
_SHAPES: dict[int, list[_Shape]] = {
    1: [_one_sum, _one_difference, _one_product, _one_quotient],
    2: [_story, _story, _story_times, _story_shared],
    3: [_story, _story, _story_times, _story_shared],
}
