import json

import pytest

from lightning_mappa.errors import ConfigError
from lightning_mappa.tasks.math_file import MathFile

SPLITS = ("train", "selection", "report")
ROWS = [{"prompt": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(20)]


def write(tmp_path, rows, name="p.json"):
    path = tmp_path / name
    path.write_text(rows if isinstance(rows, str) else json.dumps(rows), encoding="utf-8")
    return str(path)


def everything(source):
    return [task for split in SPLITS for task in source.tasks(split)]


def test_splits_are_disjoint_complete_and_sized_by_fraction(tmp_path):
    source = MathFile(write(tmp_path, ROWS))
    assert [len(source.tasks(split)) for split in SPLITS] == [10, 5, 5]
    assert sorted(task.prompt for task in everything(source)) == sorted(row["prompt"] for row in ROWS)
    assert len({task.id for task in everything(source)}) == 20
    assert {task.kind for task in everything(source)} == {"math"}
    source = MathFile(write(tmp_path, ROWS), train_fraction=0.8, selection_fraction=0.1)
    assert [len(source.tasks(split)) for split in SPLITS] == [16, 2, 2]


def test_splits_depend_on_the_seed_and_not_on_the_order_of_the_file(tmp_path):
    path, turned = write(tmp_path, ROWS), write(tmp_path, ROWS[::-1], "turned.json")

    def prompts(path, seed):
        source = MathFile(path, seed=seed)
        return [[task.prompt for task in source.tasks(split)] for split in SPLITS]

    assert prompts(path, 1) == prompts(path, 1) == prompts(turned, 1)
    assert prompts(path, 1) != prompts(path, 2)


def test_json_lines_and_an_array_hold_the_same_tasks(tmp_path):
    lines = "\n\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS) + "\n"
    for text in (lines, "\ufeff" + lines, lines.replace("\n", "\r\n")):
        tasks = everything(MathFile(write(tmp_path, text)))
        array = everything(MathFile(write(tmp_path, ROWS, "array.json")))
        assert [(t.prompt, t.reference) for t in tasks] == [(t.prompt, t.reference) for t in array]


def test_ids_come_from_the_file_or_from_the_place_in_it(tmp_path):
    rows = [{**ROWS[0], "id": 7}, {**ROWS[1], "id": "1983-1"}, {**ROWS[2], "id": None}, *ROWS[3:]]
    ids = {task.prompt: task.id for task in everything(MathFile(write(tmp_path, rows)))}
    assert [ids[row["prompt"]] for row in ROWS[:4]] == ["math-7", "math-1983-1", "math-row-3", "math-row-4"]


def test_answers_are_judged_by_their_integer(tmp_path):
    answers = ["60", 142.0, "080 or 081 (both were accepted)", r"336^\circ", -4]
    rows = [{"prompt": f"p{n}", "answer": answer, "solution": "x"} for n, answer in enumerate(answers)]
    source = MathFile(write(tmp_path, rows))
    tasks = {task.prompt: task for task in everything(source)}
    assert [tasks[f"p{n}"].reference for n in range(5)] == ["60", "142", "80 or 81", "336", "-4"]

    def grade(prompt, text):
        return source.grade(tasks[prompt], source.answer(text))

    assert grade("p0", r"\boxed{060}") == 1.0
    assert grade("p0", r"\boxed{61}") == 0.0
    assert grade("p0", "60") == 0.0
    assert [grade("p2", f"\\boxed{{{n}}}") for n in (80, 81, 82)] == [1.0, 1.0, 0.0]
    assert grade("p4", r"\boxed{-4}") == 1.0
    assert source.answer(r"so \boxed{0,012} or \boxed{012}") == "12"


def test_nothing_of_the_row_but_the_prompt_reaches_the_agents(tmp_path):
    rows = [{**row, "solution": "secret"} for row in ROWS]
    assert all(not task.metadata for task in everything(MathFile(write(tmp_path, rows))))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("", "holds no problems"),
        ("[]", "holds no problems"),
        ("[{]", "not JSON"),
        ('{"prompt": "a", "answer": 1}\n{"prompt"', r"line 2: not JSON"),
        ('{"prompt": "a", "answer": ' + "9" * 5000 + "}", r"line 1: not JSON"),
        ("\n7", r"line 2: no prompt and no answer"),
        ([{"prompt": "a", "answer": 1}, {"answer": 1}], r"row 2: no prompt;"),
        ([{"prompt": "a"}], r"row 1: no answer;"),
        ([{"prompt": " ", "answer": 1}], r"row 1: prompt=' ' is not a text"),
        ([{"prompt": 5, "answer": 1}], r"row 1: prompt=5 is not a text"),
        ([{"prompt": "a", "answer": "B"}], r"row 1: answer='B' is not a whole number"),
        ([{"prompt": "a", "answer": None}], r"row 1: answer=None is not a whole number"),
        ([{"prompt": "a", "answer": 0.5}], r"row 1: answer=0\.5 is not a whole number"),
        ([*ROWS[:3], {"prompt": " what  is 1 + 1?\n", "answer": 2}], r"row 4: the same prompt as in row 2"),
        (
            [{"prompt": "a", "answer": 1, "id": 3}, {"prompt": "b", "answer": 1, "id": "3"}],
            r"row 2: the same id as in row 1",
        ),
        (ROWS[:2], r"task\.train_fraction=0\.5.*train 1, selection 0, report 1; no split may be empty"),
    ],
)
def test_a_faulty_file_is_refused_with_the_row_named(tmp_path, rows, message):
    with pytest.raises(ConfigError, match=r"task\.path=.*p\.json") as caught:
        MathFile(write(tmp_path, rows))
    caught.match(message)


@pytest.mark.parametrize("fractions", [(0.0, 0.5), (-0.5, 0.5), (0.5, -0.1), (0.9, 0.5), (1.0, 0.5)])
def test_fractions_that_leave_a_split_empty_are_refused(tmp_path, fractions):
    with pytest.raises(ConfigError, match=r"task\.train_fraction="):
        MathFile(write(tmp_path, ROWS), 0, *fractions)


def test_files_that_cannot_be_read_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"task\.path=.*none\.json.*No such file"):
        MathFile(str(tmp_path / "none.json"))
    with pytest.raises(ConfigError, match=r"task\.path=.*Is a directory"):
        MathFile(str(tmp_path))
    (tmp_path / "latin.json").write_bytes(b'[{"prompt": "\xe9"}]')
    with pytest.raises(ConfigError, match=r"task\.path=.*not UTF-8"):
        MathFile(str(tmp_path / "latin.json"))
