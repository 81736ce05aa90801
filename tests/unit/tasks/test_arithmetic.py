import random
import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_mappa.errors import ConfigError
from lightning_mappa.tasks.arithmetic import BANDS, MAX_CHARS, Arithmetic, word_problem
from lightning_mappa.tasks.expressions import MAX_LENGTH, evaluate

SPLITS = ("train", "selection", "report")


@pytest.fixture(scope="module")
def source():
    return Arithmetic(seed=0, n_train=300, n_selection=128, n_report=256)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("57", 57),
        ("(12+7)*3", 57),
        ("12+7*3", 33),
        ("9*20//4", 45),
        ("100-30-20", 50),
        ("-7//2", -4),
        (" 2 - -3 ", 5),
        ("(((4)))", 4),
    ],
)
def test_value_by_hand(text, value):
    assert evaluate(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        "12+",
        "(12",
        "12/4",
        "2**9",
        "1//0",
        "0777",
        "1.5",
        "x",
        "__import__('os')",
        "2 3",
        "3(4)",
        "1\n+1",
        "9" * 201,
    ],
)
def test_no_value(text):
    with pytest.raises(ValueError, match=r"not an integer expression|division by zero"):
        evaluate(text)


@pytest.mark.parametrize("text", ["(" * 100 + "1" + ")" * 99, "-" * (MAX_LENGTH - 1) + "1", "1+" * 99 + "1"])
def test_deep_expressions_are_valued_or_refused(text):
    try:
        value = evaluate(text)
    except ValueError:
        return
    assert value in (-1, 1, 100)


_EXPRESSIONS = st.recursive(
    st.integers(0, 999).map(str),
    lambda inner: st.tuples(inner, st.sampled_from(["+", "-", "*", "//"]), inner).map(
        lambda parts: f"({parts[0]}{parts[1]}{parts[2]})"
    ),
    max_leaves=8,
)


@given(_EXPRESSIONS)
def test_agrees_with_python(text):
    try:
        expected = eval(text)
    except ZeroDivisionError:
        with pytest.raises(ValueError, match="division by zero"):
            evaluate(text)
    else:
        assert evaluate(text) == expected


def test_a_story_has_the_answer_it_tells(source):
    """Worked from the words alone, for the shape that has one reading in every template."""
    pattern = re.compile(r"\w+ has (\d+) red and (\d+) blue \w+, (buys|finds|gets|gives away|loses|sells) (\d+)")
    checked = 0
    for task in source.tasks("train"):
        match = pattern.match(task.prompt)
        if match and task.kind == "arithmetic/2":
            sign = 1 if match[3] in ("buys", "finds", "gets") else -1
            assert int(task.reference) == int(match[1]) + int(match[2]) + sign * int(match[4])
            checked += 1
    assert checked >= 5


@pytest.mark.parametrize("band", BANDS)
def test_problems_of_a_band(band):
    rng = random.Random(band)
    problems = [word_problem(rng, band) for _ in range(500)]
    for problem in problems:
        assert len(re.findall(r"//|[-+*]", problem.expression)) == band
        assert len(problem.text) <= MAX_CHARS
        assert len(problem.expression) <= 16
        assert problem.text.isascii()
        assert problem.value > 0
        # Every number of the expression is told, and nothing else is.
        told, used = (Counter(re.findall(r"\d+", text)) for text in (problem.text, problem.expression))
        assert told == used
    operators = Counter(re.findall(r"//|[-+*]", " ".join(problem.expression for problem in problems)))
    assert all(operators[operator] > 25 for operator in ("+", "-", "*", "//"))
    stories = {re.sub(r"\d+|\b[A-Z]\w+|\b\w+s\b", "_", problem.text) for problem in problems}
    assert len(stories) >= 10


def test_quotients_are_whole():
    rng = random.Random(0)
    expressions = [word_problem(rng, band).expression for band in BANDS for _ in range(500)]
    quotients = [expression for expression in expressions if expression.count("//") == 1]
    assert len(quotients) > 200
    for expression in quotients:
        dividend, divisor = expression.split("//")
        assert evaluate(dividend) % int(divisor) == 0


def test_no_problem_is_in_two_splits_under_any_seed():
    seen = {split: set() for split in SPLITS}
    for seed in range(4):
        source = Arithmetic(seed=seed, n_train=200, n_selection=200, n_report=200, bands=[1])
        for split in SPLITS:
            seen[split] |= {task.prompt for task in source.tasks(split)}
    assert all(len(prompts) > 400 for prompts in seen.values())
    assert not seen["train"] & seen["selection"]
    assert not seen["train"] & seen["report"]
    assert not seen["selection"] & seen["report"]


def test_sizes_ids_and_bands(source):
    tasks = [task for split in SPLITS for task in source.tasks(split)]
    assert [len(source.tasks(split)) for split in SPLITS] == [300, 128, 256]
    assert len({task.id for task in tasks}) == len(tasks)
    assert len({task.prompt for task in tasks}) == len(tasks)
    kinds = Counter(task.kind for task in source.tasks("report"))
    assert kinds == {"arithmetic/1": 86, "arithmetic/2": 85, "arithmetic/3": 85}


def test_same_seed_same_tasks_and_sizes_do_not_move_them(source):
    again = Arithmetic(seed=0, n_train=10, n_selection=128, n_report=300)
    assert again.tasks("selection") == source.tasks("selection")
    assert again.tasks("train") == source.tasks("train")[:10]
    assert again.tasks("report")[:256] == source.tasks("report")
    assert Arithmetic(seed=1, n_train=10).tasks("train") != again.tasks("train")


def test_bands_can_be_chosen():
    source = Arithmetic(n_train=20, bands=(3, 1))
    assert [task.kind for task in source.tasks("train")[:3]] == ["arithmetic/3", "arithmetic/1", "arithmetic/3"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bands": [4]}, r"task\.bands=\[4\].*\[1, 2, 3\]"),
        ({"bands": []}, r"task\.bands=\[\]"),
        ({"n_report": 0}, r"task\.n_report=0: must be at least 1"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ConfigError, match=message):
        Arithmetic(**arguments)


@pytest.mark.parametrize(
    ("text", "answer"),
    [(r"\boxed{57}", "57"), (r"so \boxed{5}, no: \boxed{ 1,057 }", "1057"), ("57", None), (r"\boxed{error}", None)],
)
def test_answer_is_the_last_boxed_integer(source, text, answer):
    assert source.answer(text) == answer


def test_grade(source):
    task = source.tasks("report")[0]
    assert source.grade(task, source.answer(rf"\boxed{{{task.reference}}}")) == 1.0
    assert source.grade(task, str(int(task.reference) + 1)) == 0.0
    assert source.grade(task, None) == 0.0
