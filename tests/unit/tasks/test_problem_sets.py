"""Rows of well-known formats, what is drawn of them, and the hub."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from lightning_mappa.errors import ConfigError
from lightning_mappa.tasks import problem_sets
from lightning_mappa.tasks.problem_sets import HubSet, ProblemFile, used_problems
from tests.packages import needs

ROWS = [{"problem": f"What is {n} + {n}?", "answer": str(2 * n), "year": 2000 + n % 4} for n in range(40)]


def write(folder: Path, rows, name: str = "p.jsonl") -> str:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


# -- formats ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("format", "row", "answer", "kind", "stratum"),
    [
        ("aime", {"prompt": "p", "answer": "080 or 081 (both were accepted)"}, "80 or 81", "aime", "aime"),
        ("aime", {"ID": "2024-I-1", "Problem": "p", "Answer": 33, "Year": 2024}, "33", "aime", "2024"),
        ("amc", {"prompt": "p", "answer": 142.0, "id": "0"}, 142.0, "amc", "amc"),
        ("amc", {"problem": "p", "answer": "C"}, "C", "amc", "amc"),
        (
            "math",
            {
                "problem": "p",
                "solution": r"so \boxed{1}, no \boxed{\frac{1}{2}}.",
                "level": "Level 3",
                "type": "Algebra",
            },
            r"\frac{1}{2}",
            "math/3",
            "math/3/Algebra",
        ),
        (
            "math",
            {"problem": "p", "answer": "x^2", "solution": r"\boxed{y}", "level": 5, "subject": "G"},
            "x^2",
            "math/5",
            "math/5/G",
        ),
        ("math", {"problem": "p", "answer": "7"}, "7", "math", "math"),
        ("gsm8k", {"question": "p", "answer": "6 * 3 = 18\n#### 18"}, "18", "gsm8k", "gsm8k"),
        ("gsm8k", {"question": "p", "answer": "#### $1,200"}, "1200", "gsm8k", "gsm8k"),
        ("gsm8k", {"question": "p", "answer": 7}, 7, "gsm8k", "gsm8k"),
    ],
)
def test_rows_of_every_format(tmp_path, format, row, answer, kind, stratum):
    (problem,) = ProblemFile(write(tmp_path, [row]), format).problems()
    assert (problem.prompt, problem.answer, problem.kind, problem.stratum) == ("p", answer, kind, stratum)
    assert problem.id == str(row.get("id", row.get("ID", "line-1")))


@pytest.mark.parametrize(
    ("format", "row", "message"),
    [
        ("aime", {"prompt": "p", "answer": 1000}, "not a whole number from 0 to 999"),
        ("aime", {"prompt": "p"}, "it has no answer"),
        ("aime", {"answer": 1}, "it has no text under prompt, problem, question"),
        ("aime", {"prompt": 3, "answer": 1}, "it has no text"),
        ("aime", 3, "a row is an object"),
        ("math", {"problem": "p", "solution": r"\boxed{1"}, r"neither an answer nor a solution with a closed"),
        ("gsm8k", {"question": "p"}, "it has no answer"),
    ],
)
def test_a_row_that_lacks_something_is_named(tmp_path, format, row, message):
    rows = [{"problem": "q", "answer": "1", "solution": r"\boxed{1}"}, row]
    with pytest.raises(ConfigError, match=rf"p\.jsonl, line 2: .*{message}"):
        ProblemFile(write(tmp_path, rows), format).problems()


def test_unknown_formats_and_examples_and_doubled_problems_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="format='amie': allowed are aime, amc, math, gsm8k"):
        ProblemFile(write(tmp_path, ROWS), "amie").problems()
    with pytest.raises(ConfigError, match="allowed are fixture/aime, fixture/amc, fixture/gsm8k, fixture/math"):
        ProblemFile("fixture/aimee", "aime").problems()
    with pytest.raises(ConfigError, match=r"line 41: the same problem or id as in line 1"):
        ProblemFile(write(tmp_path, [*ROWS, {**ROWS[0], "answer": 3}]), "aime").problems()
    with pytest.raises(ConfigError, match="there are no problems"):
        ProblemFile(write(tmp_path, []), "aime").problems()
    with pytest.raises(ConfigError, match=r"path=.*none\.jsonl: the file cannot be read"):
        ProblemFile(str(tmp_path / "none.jsonl"), "aime").problems()


# -- subsets ----------------------------------------------------------------------------------------------------


def test_a_subset_is_seeded_balanced_and_kept(tmp_path):
    path, kept = write(tmp_path, ROWS), tmp_path / "kept" / "indices.json"
    first = used_problems(ProblemFile(path, "aime", limit=12, indices=str(kept)), seed=5)
    assert [p.stratum for p in first].count("2001") == 3
    record = json.loads(kept.read_text())
    assert [ROWS[i]["problem"] for i in record["indices"]] == [p.prompt for p in first]
    assert record["seed"] == 5
    # The file decides from then on, whatever the seed.
    assert used_problems(ProblemFile(path, "aime", limit=12, indices=str(kept)), seed=6) == first
    assert used_problems(ProblemFile(path, "aime", limit=12), seed=5) == first
    assert used_problems(ProblemFile(path, "aime", limit=12), seed=6) != first


def test_indices_of_other_data_are_refused(tmp_path):
    kept = str(tmp_path / "indices.json")
    used_problems(ProblemFile(write(tmp_path, ROWS), "aime", limit=12, indices=kept), seed=5)
    changed = write(tmp_path, [{**ROWS[0], "answer": "7"}, *ROWS[1:]], "q.jsonl")
    with pytest.raises(ConfigError, match="was written for other problems"):
        used_problems(ProblemFile(changed, "aime", limit=12, indices=kept), seed=5)
    with pytest.raises(ConfigError, match="names 12 problems, but limit=11"):
        used_problems(ProblemFile(str(tmp_path / "p.jsonl"), "aime", limit=11, indices=kept), seed=5)
    (tmp_path / "indices.json").write_text("[]")
    with pytest.raises(ConfigError, match="not a file of drawn problems"):
        used_problems(ProblemFile(str(tmp_path / "p.jsonl"), "aime", limit=12, indices=kept), seed=5)


def test_limits_out_of_range_are_refused(tmp_path):
    path = write(tmp_path, ROWS)
    with pytest.raises(ConfigError, match="limit=0"):
        ProblemFile(path, "aime", limit=0)
    with pytest.raises(ConfigError, match="limit=41: p holds 40 problems"):
        used_problems(ProblemFile(path, "aime", limit=41), seed=0)


# -- the hub ----------------------------------------------------------------------------------------------------


def test_a_file_takes_the_place_of_the_hub(tmp_path):
    source = HubSet("own/numbers", "aime", split="test", folder=str(tmp_path))
    write(tmp_path, ROWS, "own__numbers__test.jsonl")
    assert len(source.problems()) == 40
    assert source.name == "own__numbers__test"
    assert HubSet("own/numbers", "aime", config="big").place.name == "own__numbers__big__train.jsonl"


def test_without_a_hub_the_message_names_the_file_to_place(tmp_path, monkeypatch):
    source = HubSet("own/numbers", "aime", split="test", revision="abc", folder=str(tmp_path))

    class Unreachable:
        @staticmethod
        def load_dataset(*_: object, **__: object) -> None:
            raise ConnectionError("no route\nto host")

    monkeypatch.setattr(problem_sets.importlib, "import_module", lambda name: Unreachable)
    place = tmp_path.absolute() / "own__numbers__test.jsonl"
    with pytest.raises(ConfigError) as caught:
        source.problems()
    assert str(caught.value) == (
        "repo=own/numbers: its split test at revision abc cannot be loaded from the Hugging Face hub"
        f" (ConnectionError: no route to host); without a hub, place that split as JSON lines at {place}"
    )


@pytest.mark.skipif(importlib.util.find_spec("datasets") is not None, reason="datasets is installed")
def test_without_the_library_the_extra_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"pip install 'lightning-mappa\[data\]'.*place that split as JSON lines"):
        HubSet("own/numbers", "aime", folder=str(tmp_path)).problems()


@needs("datasets")
def test_the_real_library_reads_a_data_set(tmp_path, monkeypatch):
    """From a folder in the hub's layout, which `load_dataset` takes in place of an id."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    (tmp_path / "numbers").mkdir()
    write(tmp_path / "numbers", ROWS, "test.jsonl")
    source = HubSet(str(tmp_path / "numbers"), "aime", split="test", folder=str(tmp_path / "none"))
    assert [problem.answer for problem in source.problems()] == [row["answer"] for row in ROWS]
