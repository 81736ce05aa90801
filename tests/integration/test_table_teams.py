"""Teams on tables end to end: real files, real programs in the real sandbox, the rules coach, and what is measured."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module

from lightning_mappa.build import build
from lightning_mappa.errors import ConfigError
from lightning_mappa.rollout.coordinator import RolloutCoordinator
from lightning_mappa.rollout.engine import SamplingParams
from lightning_mappa.rollout.plan import RolloutPlan
from lightning_mappa.tables.source import Tables
from lightning_mappa.testing import ScriptedEngine, char_tokenizer
from lightning_mappa.tools.python import PythonTool
from lightning_mappa.tools.workspace import Workspaces
from lightning_mappa.types import EpisodeStatus, ScoredEpisode, Task, ToolStatus
from lightning_mappa.workflows.conversation import ChatFormat
from lightning_mappa.workflows.prompts import PromptTemplate
from lightning_mappa.workflows.seat import AgentSeat, AgentSpec
from tests.integration.table_teams import SUMMARY, Planted, Script, analyst, block, engineer, perfect, planted

pytestmark = pytest.mark.slow

TOKENIZER = char_tokenizer()
LENGTH = 200_000
MODULES = ["joblib", "numpy", "pandas", "sklearn.ensemble"]


@pytest.fixture(scope="module")
def source() -> Iterator[Tables]:
    source = Tables()
    yield source
    source.close()


@pytest.fixture(scope="module")
def tool() -> Iterator[PythonTool]:
    """With the sandbox of this machine, warm where it can be."""
    settings: dict[str, Any] = {"wall_s": 60.0, "cpu_s": 10, "memory_mb": 2048}
    tool = PythonTool(warm=MODULES, **settings)
    try:
        tool.check()
    except ConfigError:
        tool = PythonTool(**settings)
        tool.check()
    yield tool
    tool.close()


@pytest.fixture(scope="module")
def cfg() -> Any:
    with initialize_config_module("lightning_mappa.conf", version_base="1.3"):
        return compose("fit", overrides=["experiment=dsbench", "prompts=paper"])


class Teams:
    """Plays scripts on tasks with the workflow, prompts and coach of the config."""

    def __init__(self, cfg: Any, source: Tables, tool: PythonTool) -> None:
        self.prompts: list[tuple[str, str]] = []
        self._cfg, self._source, self._tool = cfg, source, tool

    def play(self, task: Task, script: Script) -> ScoredEpisode:
        texts = {agent: iter(turns) for agent, turns in script.items()}

        def say(request: Any, prompt: str) -> str:
            self.prompts.append((request.agent_id, prompt))
            return next(texts[request.agent_id])

        workspaces = Workspaces()
        coordinator = RolloutCoordinator(
            workflow=build(self._cfg.workflow, "workflow"),
            source=self._source,
            engine=ScriptedEngine(say, TOKENIZER, context_length=LENGTH),
            coach=build(self._cfg.coach, "coach"),
            seat_for=self._seat,
            workspaces=lambda episode_id: workspaces.open(),
            max_episodes_in_flight=1,
            deadline_s=300,
        )
        plan = RolloutPlan(split="train", step=0, tasks=[task], n_samples=1, temperature=1.0, scored=True)
        (scored,) = asyncio.run(coordinator.collect(plan)).episodes
        return scored

    def _seat(self, agent_id: str, context: Any) -> AgentSeat:
        node = self._cfg.agents[agent_id]
        spec = AgentSpec(
            agent_id=agent_id,
            role=node.role,
            system=node.system,
            user=PromptTemplate(node.user, agent_id=agent_id, key="user"),
            observation=PromptTemplate(self._cfg.prompts.observation, agent_id=agent_id, key="observation"),
            chat=ChatFormat(TOKENIZER),
            sampling=SamplingParams(max_new_tokens=8000),
            context_length=LENGTH,
            tools=(self._tool,),
            max_turns=node.max_turns,
        )
        return AgentSeat(
            spec=spec,
            episode_id=context.episode_id,
            session=context.session,
            workspace=context.workspace,
            seed=lambda agent, turn: turn,
            actions=context.actions,
        )


@pytest.fixture(scope="module")
def teams(cfg: Any, source: Tables, tool: PythonTool) -> Teams:
    return Teams(cfg, source, tool)


def task_named(source: Tables, name: str) -> Task:
    return next(task for split in ("train", "selection", "report") for task in source.tasks(split) if name in task.id)


def scores_of(scored: ScoredEpisode) -> dict[str, list[float | None]]:
    scores: dict[str, list[float | None]] = {}
    for action, verdict in zip(scored.episode.actions, scored.verdicts, strict=True):
        scores.setdefault(action.agent_id, []).append(verdict.score)
    return scores


@pytest.mark.parametrize(
    ("name", "metric", "at_least", "at_most"),
    [
        ("parcel-returns", "accuracy", 0.65, 1),
        ("iris", "accuracy", 0.85, 1),
        ("bike-minutes", "rmse_percent", 1, 25),
        ("farm-harvest", "rmse_percent", 1, 30),
    ],
)
def test_a_team_that_does_everything_right(teams, source, name, metric, at_least, at_most):
    task = task_named(source, name)
    scored = teams.play(task, perfect(task))
    episode = scored.episode
    assert (episode.status, episode.outcome, episode.fault) == (EpisodeStatus.OK, 1.0, "")
    assert at_least <= episode.metrics[metric] <= at_most
    assert episode.metrics[f"fair/{metric}"] == episode.metrics[metric]
    scores = scores_of(scored)
    assert scores["engineer"] == scores["modeler"] == [9.0, 8.0]
    cap = expected_cap(episode.metrics)
    assert scores["analyst"] == [min(9.0, cap), min(8.0, cap)]
    trail = {change.path: a.agent_id for a in episode.actions for r in a.tool_results for change in r.files}
    assert trail == {
        **dict.fromkeys(("X_train.pkl", "y_train.pkl", "X_test.pkl"), "engineer"),
        "model.pkl": "modeler",
        "submission.csv": "analyst",
    }


def expected_cap(metrics) -> float:
    """The published bands once more, written down in another way."""
    if "rmse_percent" in metrics:
        error = metrics["rmse_percent"]
        return 9 if error < 10 else 8 if error <= 25 else 6 if error <= 50 else 4
    best = max(metrics["accuracy"], metrics.get("roc_auc", 0))
    return 9 if best >= 0.85 else 8 if best >= 0.75 else 6 if best >= 0.65 else 4 if best >= 0.55 else 3


FAULTS = [
    fault.name
    for fault in planted(
        Task(id="t", kind="k", prompt="", metadata={"type": "classification", "targets": ["y"], "id_column": "id"})
    )
]


@pytest.mark.parametrize("name", FAULTS)
def test_one_planted_fault_is_found_where_it_was_planted(teams, source, name):
    task = task_named(source, "parcel-returns")
    fault: Planted = next(fault for fault in planted(task) if fault.name == name)
    script = {**perfect(task), fault.guilty: fault.turns}
    for agent in fault.stopped:
        script[agent] = [script[agent][0], "I could not go on."]
    scored = teams.play(task, script)
    episode = scored.episode
    assert episode.status is EpisodeStatus.OK
    assert episode.fault == fault.fault
    assert episode.outcome == float(not fault.fault)
    if fault.fault:
        assert episode.reason
        assert episode.metrics == {"fair/accuracy": 0.5, "fair/f1": 0.0}
    else:
        assert episode.metrics["fair/accuracy"] == episode.metrics["accuracy"]

    scores = {agent: [s for s in given if s is not None] for agent, given in scores_of(scored).items()}
    assert all(len(given) == len(list(scores_of(scored)[agent])) for agent, given in scores.items())
    assert min(scores, key=lambda agent: statistics.fmean(scores[agent])) == fault.guilty
    assert max(scores[fault.guilty]) <= (2 if fault.fault else 4)
    for agent in fault.stopped:
        assert all(3 <= score <= 5 for score in scores[agent]), scores
    for agent in scores.keys() - {fault.guilty, *fault.stopped}:
        assert min(scores[agent]) >= (8 if fault.fault else 5), scores


def test_an_analyst_who_makes_up_for_a_missing_file_is_not_held_down(teams, source):
    task = task_named(source, "parcel-returns")
    script = perfect(task)
    script["engineer"] = [block(engineer(task, saves=("X_train", "y_train"))), SUMMARY]
    again = engineer(task, saves=("X_test",)) + analyst(task)
    script["analyst"] = [block(again, "X_test.pkl is not there, so I make it."), SUMMARY]
    scored = teams.play(task, script)
    assert scored.episode.outcome == 1.0
    scores = scores_of(scored)
    assert scores["engineer"] == [1.0, 1.0]
    cap = expected_cap(scored.episode.metrics)
    assert scores["analyst"] == [min(9.0, cap), min(8.0, cap)]


def test_a_fault_that_is_repaired_costs_only_the_turn_that_had_it(teams, source):
    task = task_named(source, "bike-minutes")
    script = perfect(task)
    script["engineer"] = [
        block("import pandas as pd\nprint(pd.read_csv('train.csv').shape)"),
        block("import joblib\njoblib.dump(nothing, 'X_train.pkl')"),
        block(engineer(task, saves=("X_train", "y_train"))),
        block(engineer(task)),
    ]
    scored = teams.play(task, script)
    assert scored.episode.outcome == 1.0
    assert scores_of(scored)["engineer"] == [6.0, 4.0, 7.0, 9.0]
    assert scored.episode.actions[1].tool_results[0].status is ToolStatus.NONZERO


def test_agents_read_of_files_and_never_of_labels(teams, source):
    teams.prompts.clear()
    task = task_named(source, "iris")
    script = perfect(task)
    script["engineer"] = [block(engineer(task, saves=("X_train", "y_train"))), SUMMARY]
    script["analyst"] = [block(analyst(task)), SUMMARY]
    teams.play(task, script)
    first = {agent: next(prompt for who, prompt in teams.prompts if who == agent) for agent in script}
    assert "- train.csv (came with the task)" in first["engineer"]
    assert "- X_train.pkl (" in first["modeler"]
    assert "bytes, written by Data Engineer in turn 1)" in first["modeler"]
    assert "WARNING" not in first["engineer"] + first["modeler"]
    assert "WARNING: you need X_test.pkl, and it is not there." in first["analyst"]
    assert "bytes, written by Modeler in turn 1)" in first["analyst"]
    answers = source._tables[task.id].answer_file.read_text().splitlines()[1:]
    assert len(answers) > 10
    for prompt in first.values():
        assert task.prompt in prompt
        assert "flower_id,species" in prompt
        assert sum(line in prompt for line in answers) <= 3  # the lines of the sample that chance has right


def test_answers_lie_where_no_program_reaches(teams, source):
    task = task_named(source, "iris")
    folder = Path(source._folder.name)
    assert folder.is_relative_to(tempfile.gettempdir())
    look = f"""
import os, pathlib
print("seen:", os.path.exists({str(folder)!r}))
for root in ("/tmp", "/var/tmp", "/root", "/home", "."):
    for path in pathlib.Path(root).rglob("*answer*.csv"):
        print("found:", path)
"""
    script = {**perfect(task), "analyst": [block(look), SUMMARY]}
    scored = teams.play(task, script)
    (result,) = [r for a in scored.episode.actions if a.agent_id == "analyst" for r in a.tool_results]
    assert result.ok, result
    assert result.stdout.startswith("seen: False")
    assert "found:" not in result.stdout
