"""Demonstrated programs run for real: right ones hand in, and each fault does what its name says."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from importlib.resources import files

import pytest
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_mappa.errors import ConfigError
from lightning_mappa.models.build_tiny import encode
from lightning_mappa.models.build_tiny_tables import table_batches, table_tokenizer
from lightning_mappa.models.table_demos import (
    PROGRAMS,
    ROLES,
    TableFaults,
    TablePrompts,
    demo_tasks,
    demonstrate,
    fenced,
)
from lightning_mappa.tables.source import Tables
from lightning_mappa.tools.python import PythonTool
from lightning_mappa.tools.workspace import Workspaces
from lightning_mappa.types import ToolStatus

TINY_TABLES = files("lightning_mappa.models") / "tiny_tables"
MODULES = ["joblib", "numpy", "pandas", "sklearn.ensemble", "sklearn.preprocessing"]
PARTS = {"engineer": ["X_test.pkl", "X_train.pkl", "y_train.pkl"], "modeler": ["model.pkl"], "analyst": []}
FAULTS = [name.split("_", 1) for name in TableFaults.__dataclass_fields__]


@pytest.fixture(scope="module")
def source() -> Iterator[Tables]:
    source = Tables(seed=3, generated={"train": 8, "selection": 1, "report": 1})
    yield source
    source.close()


@pytest.fixture(scope="module")
def tool() -> Iterator[PythonTool]:
    tool = PythonTool(warm=MODULES, wall_s=60.0, cpu_s=30, memory_mb=2048)
    try:
        tool.check()
    except ConfigError:
        tool = PythonTool(wall_s=60.0, cpu_s=30, memory_mb=2048)
        tool.check()
    yield tool
    tool.close()


def play(source, tool, task, faults):
    """Statuses by role, which of the expected files lie there in the end, and the grade."""
    statuses = {}
    with Workspaces().open() as workspace:
        source.hand_out(task, workspace)
        for role in ROLES:
            (call,) = tool.parse(fenced(PROGRAMS[role](task, faults.get(role, ""))))
            statuses[role] = asyncio.run(tool.run(call, workspace)).status
        names = {path.name for path in workspace.iterdir()}
        return statuses, names, source.grade_files(task, workspace)


def test_right_programs_hand_in_on_every_kind_of_table(source, tool):
    tasks = source.tasks("train")
    assert len({task.metadata["table_kind"] for task in tasks}) == 8
    for task in tasks:
        statuses, names, grade = play(source, tool, task, {})
        assert set(statuses.values()) == {ToolStatus.OK}, task
        assert {name for made in PARTS.values() for name in made} <= names
        assert (grade.outcome, grade.fault) == (1.0, ""), task


def of_type(source, kind, targets=1):
    return next(
        task
        for task in source.tasks("train")
        if task.metadata["type"] == kind and len(task.metadata["targets"]) == targets
    )


@pytest.mark.parametrize(
    ("role", "fault", "kind", "failing", "lacking", "fault_of_the_hand_in"),
    [
        ("engineer", "forgets", "classification", {"analyst"}, {"X_test.pkl"}, "missing"),
        ("engineer", "leaks", "regression", set(), set(), ""),
        ("engineer", "misnames", "regression", {"engineer", "modeler", "analyst"}, {"X_train.pkl"}, "missing"),
        ("modeler", "kind", "regression", {"modeler", "analyst"}, {"model.pkl"}, "missing"),
        ("modeler", "forgets", "classification", {"analyst"}, {"model.pkl"}, "missing"),
        ("analyst", "column", "classification", set(), set(), "missing_column"),
        ("analyst", "index", "regression", set(), set(), "extra_column"),
    ],
)
def test_a_fault_does_what_it_says(source, tool, role, fault, kind, failing, lacking, fault_of_the_hand_in):
    assert [role, fault] in FAULTS
    statuses, names, grade = play(source, tool, of_type(source, kind), {role: fault})
    assert {name for name, status in statuses.items() if status is not ToolStatus.OK} == failing
    assert not lacking & names
    assert grade.fault == fault_of_the_hand_in, grade


def test_a_regression_on_text_labels_stops_the_modeler(source, tool):
    task = next(task for task in source.tasks("train") if task.metadata["table_kind"] == "text_labels")
    statuses, names, grade = play(source, tool, task, {"modeler": "kind"})
    assert (statuses["engineer"], statuses["modeler"]) == (ToolStatus.OK, ToolStatus.NONZERO)
    assert "model.pkl" not in names
    assert grade.fault == "missing"


def test_faults_occur_at_their_rates():
    tasks, rates, prompts, rng = demo_tasks(16), TableFaults(), TablePrompts(), random.Random(0)
    n, seen = 2000, Counter()
    for number in range(n):
        task = tasks[number % len(tasks)]
        for role, chat in zip(ROLES, demonstrate(task, rates, rng, prompts), strict=True):
            said = chat[-1]["content"]
            (name,) = [fault for fault in ("", *faults_of(role)) if said == fenced(PROGRAMS[role](task, fault))]
            seen[f"{role}_{name}"] += 1
    for name in rates.__dataclass_fields__:
        assert seen[name] / n == pytest.approx(getattr(rates, name), abs=0.03), name


def faults_of(role):
    return [fault for of, fault in FAULTS if of == role]


def test_demonstrations_ask_as_the_experiment_does_and_fit_their_limits():
    tasks, prompts, rng = demo_tasks(24), TablePrompts(), random.Random(1)
    tokenizer = table_tokenizer(tasks)
    assert prompts.opening("modeler", tasks[0], ["y_train.pkl"])[0]["content"] == (
        f"Model without y_train.pkl: {tasks[0].prompt}"
    )
    for task in tasks:
        for role, chat in zip(ROLES, demonstrate(task, TableFaults(), rng, prompts), strict=True):
            ids = tokenizer.encode(chat[-1]["content"])
            assert len(ids) + 1 <= prompts.max_new_tokens[role]
            assert len(tokenizer.encode(chat[0]["content"])) + 200 < 512


def test_batches_are_seeded():
    tasks = demo_tasks(8)
    tokenizer = table_tokenizer(tasks)
    first, second = (next(table_batches(0, tasks, 2, TableFaults(), tokenizer)) for _ in range(2))
    assert len(first) == len(ROLES)
    assert all(a.equal(b) for one, two in zip(first, second, strict=True) for a, b in zip(one, two, strict=True))


def test_the_packaged_model_is_small_licensed_and_reads_every_generated_table():
    model = AutoModelForCausalLM.from_pretrained(str(TINY_TABLES))
    tokenizer = AutoTokenizer.from_pretrained(str(TINY_TABLES))
    weights = TINY_TABLES / "model.safetensors"
    assert sum(parameter.numel() for parameter in model.parameters()) <= 200_000
    assert len(weights.read_bytes()) <= 2**20
    with safe_open(str(weights), framework="pt") as file:
        assert file.metadata()["licence"] == "Apache-2.0"
    assert model.config.vocab_size == len(tokenizer)
    rng, prompts = random.Random(2), TablePrompts()
    for task in demo_tasks(24, seed=11):
        for chat in demonstrate(task, TableFaults(), rng, prompts):
            ids = tokenizer.encode(chat[-1]["content"])
            assert len(ids) <= 200
            assert tokenizer.unk_token_id not in ids
            _, targets = encode([chat], tokenizer)
            assert targets[targets != -100].tolist() == [*ids, tokenizer.eos_token_id]
