"""Problem sets of well-known formats as tasks: what is read, drawn, kept apart, refused and graded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module

from lightning_mappa.build import build
from lightning_mappa.checks import check
from lightning_mappa.config import structured
from lightning_mappa.errors import ConfigError
from lightning_mappa.metrics import success_metrics
from lightning_mappa.tasks.base import Grade
from lightning_mappa.tasks.math_sets import SPLITS, MathSets
from lightning_mappa.tasks.problem_sets import ProblemFile
from lightning_mappa.tasks.verifiers import LetterVerifier
from tests.packages import needs
from tests.unit.factories import make_scored

ROWS = [{"problem": f"What is {n} + {n}?", "answer": str(2 * n), "year": 2000 + n % 4} for n in range(40)]


def write(folder: Path, rows, name: str = "p.jsonl") -> str:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def fixture(name: str) -> ProblemFile:
    return ProblemFile(f"fixture/{name}", name)


# -- splits -----------------------------------------------------------------------------------------------------


def test_selection_is_kept_out_of_training(tmp_path):
    source = MathSets(ProblemFile(write(tmp_path, ROWS), "aime"), fixture("amc"), selection=8)
    assert [len(source.tasks(split)) for split in SPLITS] == [32, 8, 8]
    prompts = [task.prompt for split in ("train", "selection") for task in source.tasks(split)]
    assert sorted(prompts) == sorted(row["problem"] for row in ROWS)
    assert [task.metadata["stratum"] for task in source.tasks("selection")].count("2001") == 2
    again = MathSets(ProblemFile(write(tmp_path, ROWS), "aime"), fixture("amc"), selection=8)
    assert all(again.tasks(split) == source.tasks(split) for split in SPLITS)
    for count in (0, 40):
        with pytest.raises(ConfigError, match=f"task.selection={count}: allowed is 1 to 39"):
            MathSets(ProblemFile(write(tmp_path, ROWS), "aime"), fixture("amc"), selection=count)


def test_a_problem_in_two_splits_stops_the_run(tmp_path):
    train = ProblemFile(write(tmp_path, ROWS, "train.jsonl"), "aime")
    report = ProblemFile(write(tmp_path, [{**ROWS[3], "problem": "what is  $3+3$"}], "report.jsonl"), "aime")
    with pytest.raises(ConfigError, match=r"1 pairs of problems .*\n.*train-line-\d+ and report/report-line-1"):
        MathSets(train, report, selection=4)
    same = ProblemFile(write(tmp_path, ROWS[:20], "a.jsonl"), "aime")
    with pytest.raises(ConfigError, match="12 pairs"):  # 20 less those that were kept for selection
        MathSets(ProblemFile(write(tmp_path, ROWS[:12], "b.jsonl"), "aime"), fixture("amc"), selection=same)
    with pytest.raises(ConfigError, match="max_containment=0"):
        MathSets(train, fixture("amc"), selection=4, max_containment=0)


def test_sets_of_one_name_are_refused(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    train = ProblemFile(write(tmp_path / "a", ROWS[:20]), "aime")
    report = ProblemFile(write(tmp_path / "b", ROWS[20:]), "aime")
    with pytest.raises(ConfigError, match="the id p-line-"):
        MathSets(train, report, selection=4)


# -- grading ----------------------------------------------------------------------------------------------------


def test_integers_are_the_rule_and_letters_are_asked_for(tmp_path):
    source = MathSets(fixture("aime"), fixture("amc"), selection=2)
    task = next(task for task in source.tasks("report") if task.reference == "-18")
    assert source.grade(task, source.answer(r"\boxed{-18}")) == 1.0
    assert source.grade_text(task, "no box: -18") == Grade(outcome=0.0, fault="no_answer")
    assert source.grade_text(task, r"\boxed{18}") == Grade(outcome=0.0, answer="18")
    letters = write(tmp_path, [{"problem": f"p {c}", "answer": c} for c in "ABCDE"])
    other = write(tmp_path, [{"problem": f"q {c}", "answer": c} for c in "ABCDE"], "q.jsonl")
    with pytest.raises(ConfigError, match=r"the answer of .*: '[A-E]' is not a whole number; set task\.verifier"):
        MathSets(ProblemFile(letters, "amc"), ProblemFile(other, "amc"), selection=2)
    chosen = MathSets(ProblemFile(letters, "amc"), ProblemFile(other, "amc"), selection=2, verifier=LetterVerifier())
    task = next(task for task in chosen.tasks("report") if task.reference == "D")
    assert chosen.grade(task, chosen.answer(r"\boxed{\textbf{(D)}}")) == 1.0


@needs("math_verify")
def test_a_set_of_free_forms_is_graded_by_value(tmp_path):
    source = MathSets(fixture("gsm8k"), fixture("math"), selection=2)
    try:
        task = next(task for task in source.tasks("report") if task.reference == r"\frac{4}{11}")
        assert source.grade(task, source.answer(r"\boxed{\dfrac{36}{99}}")) == 1.0
        assert source.grade(task, source.answer(r"\boxed{\frac{4}{10}}")) == 0.0
        stalled = source.grade_text(task, r"\boxed{9^{9^{9^9}}}")
        assert (stalled.outcome, stalled.fault) == (0.0, "timeout")
        assert "more than 2 s" in stalled.detail
        of_train = source.tasks("train")[0]
        assert source.grade(of_train, source.answer(rf"\boxed{{{of_train.reference}}}")) == 1.0
    finally:
        source.close()


def test_figures_over_examples_say_so():
    source = MathSets(fixture("aime"), fixture("amc"), selection=2)
    episodes = [make_scored(task.id, [], [], task=task, outcome=1.0) for task in source.tasks("report")]
    metrics = success_metrics(episodes)
    assert metrics["success/fixture/amc"] == 1.0
    assert metrics["fixture"] == 1.0
    assert not any(name.startswith("success/amc") for name in metrics)


def test_nothing_but_the_problem_and_its_stratum_reaches_the_agents(tmp_path):
    rows = [{**row, "solution": "secret", "url": "secret"} for row in ROWS]
    source = MathSets(ProblemFile(write(tmp_path, rows), "aime"), fixture("amc"), selection=4)
    assert all(set(task.metadata) == {"stratum"} for split in SPLITS for task in source.tasks(split))


# -- from a config ----------------------------------------------------------------------------------------------


def configured(*overrides: str):
    with initialize_config_module("lightning_mappa.conf", version_base="1.3"):
        cfg = structured(compose("fit", overrides=list(overrides)))
    check(cfg)
    return build(cfg.task, "task")


def test_files_by_config():
    source = configured(
        *("task=math_sets", "task.train.path=fixture/aime", "task.train.limit=6", "task.selection=2"),
        *("task.report.path=fixture/amc", "task.report.format=amc"),
    )
    assert isinstance(source, MathSets)
    assert [len(source.tasks(split)) for split in SPLITS] == [4, 2, 8]


def test_the_hub_by_config(tmp_path):
    write(tmp_path, ROWS[:30], "own__numbers__train.jsonl")
    write(tmp_path, ROWS[30:], "own__numbers__test.jsonl")
    of_split = [
        override
        for split in ("train", "report")
        for override in (
            f"task.{split}.repo=own/numbers",
            f"task.{split}.format=aime",
            f"task.{split}.folder={tmp_path}",
        )
    ]
    source = configured("task=math_hub", "task.selection=2", *of_split)
    assert [len(source.tasks(split)) for split in SPLITS] == [28, 2, 10]
    with pytest.raises(ConfigError, match=r"repo has no value"):
        configured("task=math_hub")
