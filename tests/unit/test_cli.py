"""The command line from arguments to exit code, through the real Hydra; only the commands' work is replaced."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf

from lightning_mappa import cli
from lightning_mappa.errors import ConfigError, InfrastructureError, Preempted

Mappa = Callable[..., int]


class Work:
    """Stands in for lightning_mappa.fit and .evaluate: keeps the configs it is given, then does `act`."""

    def __init__(self) -> None:
        self.configs: list[DictConfig] = []
        self.act: Callable[[DictConfig], Any] = lambda cfg: {"val": {"success": {"selected": 0.5}}}

    def __call__(self, cfg: DictConfig) -> Any:
        self.configs.append(cfg)
        return self.act(cfg)


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Work:
    work = Work()
    module = ModuleType("commands_under_test")
    for command in cli.COMMANDS:
        setattr(module, command, work)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    places = {command: (module.__name__, keys) for command, (_, keys) in cli.COMMANDS.items()}
    monkeypatch.setattr(cli, "COMMANDS", places)
    return work


@pytest.fixture
def mappa(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Mappa:
    """Runs the command in an empty current folder and returns its exit code."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run(*arguments: str, full_error: str = "0") -> int:
        monkeypatch.setenv(cli.FULL_ERROR, full_error)
        monkeypatch.setattr(sys, "argv", ["mappa", *arguments])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        return int(stopped.value.code or 0)

    return run


def saved_run(folder: Path, work: Work, mappa: Mappa) -> Path:
    assert mappa("fit", "trainer.max_steps=7") == 0
    folder.mkdir()
    (folder / "config.yaml").write_text(OmegaConf.to_yaml(work.configs.pop(), resolve=True))
    return folder


# -- arguments ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "arguments", "named"),
    [
        ("fit", ["seed=1", "-m", "+a.b=2", "~c"], ["seed=1", "-m", "+a.b=2", "~c"]),
        ("test", ["runs/a"], ["run='runs/a'"]),
        ("test", ["seed=1", "runs/a"], ["seed=1", "run='runs/a'"]),
        ("validate", ["--config-dir", "mine", "runs/a"], ["--config-dir", "mine", "run='runs/a'"]),
        ("predict", ["runs/a", "f(x, y) = 3?"], ["run='runs/a'", "inputs='f(x, y) = 3?'"]),
        ("predict", ["run=a", "what's 2+2"], ["run=a", r"inputs='what\'s 2+2'"]),
        ("export", ["runs/a", "agent=solver", "to=x=y"], ["run='runs/a'", "export.agent=solver", "export.to=x=y"]),
        ("export", ["version=3", "seed=1", "runs/a"], ["export.version=3", "seed=1", "run='runs/a'"]),
        ("fit", ["agent=solver"], ["agent=solver"]),
        ("predict", ["agent@agents.x=solver", "r", "q"], ["agent@agents.x=solver", "run='r'", "inputs='q'"]),
    ],
)
def test_positional_arguments_become_overrides(command: str, arguments: list[str], named: list[str]):
    assert cli.name_positionals(command, arguments) == named


def test_one_argument_too_many_is_refused():
    with pytest.raises(ConfigError, match=r"'again' is no override .* mappa test takes no more"):
        cli.name_positionals("test", ["runs/a", "again"])


@given(st.text(alphabet="ab'\"\\${}[](),=: \n~*", max_size=12) | st.text(max_size=12))
def test_a_quoted_text_comes_back_as_it_was(text: str):
    override = OverridesParser.create().parse_override(f"inputs={cli.quote(text)}")
    cfg = OmegaConf.create({"inputs": None})
    OmegaConf.update(cfg, "inputs", override.value())
    assert not override.is_sweep_override()
    assert cfg.inputs == text or text == "???"


@pytest.mark.parametrize("arguments", [[], ["--help"], ["fitt"], ["seed=1"]])
def test_without_a_command_there_is_a_usage_line(mappa: Mappa, capsys: Any, arguments: list[str]):
    assert mappa(*arguments) == 2
    assert capsys.readouterr().err.startswith("usage: mappa fit")


def test_help_is_hydras(mappa: Mappa, work: Work, capsys: Any):
    assert mappa("fit", "--help") == 0
    shown = capsys.readouterr().out
    assert "experiment: " in shown
    assert "rollout_batch_size" in shown
    assert not work.configs


@pytest.mark.parametrize("arguments", [["fit", "--help"], ["compare", "--help"], ["plan"], ["plan", "plan.json=true"]])
def test_a_reader_that_has_read_enough_is_no_error(tmp_path: Path, arguments: list[str]):
    done = into_a_closed_pipe(tmp_path, *arguments)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_run_that_nobody_reads_says_so(tmp_path: Path):
    done = into_a_closed_pipe(tmp_path, "fit", "experiment=tiny_cpu", "trainer.max_steps=1")
    assert (done.returncode, done.stderr) == (6, "mappa: nobody reads the output of mappa fit any more\n")


def into_a_closed_pipe(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "lightning_mappa", *arguments]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    try:
        return subprocess.run(command, cwd=folder, stdout=writer, stderr=subprocess.PIPE, text=True, env=environment)
    finally:
        os.close(writer)


# -- configs --------------------------------------------------------------------------------------------------


def test_fit_gets_a_structured_config_with_a_folder_to_make(mappa: Mappa, work: Work, tmp_path: Path):
    assert mappa("fit", "agents.solver.lr=1e-5") == 0
    (cfg,) = work.configs
    assert cfg.agents.solver.lr == 1e-5
    assert cfg.agents.verifier.lr == cfg.optimizer.lr
    assert cfg.output_dir.startswith("runs/20")
    assert list(tmp_path.iterdir()) == []


def test_waiting_threads_hardly_spin_unless_the_user_says_so(mappa: Mappa, work: Work, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    assert mappa("fit") == 0
    assert os.environ["GOMP_SPINCOUNT"] == "1000"
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    assert mappa("fit") == 0
    assert os.environ["GOMP_SPINCOUNT"] == "7"


def test_an_experiment_and_a_users_config_folder(mappa: Mappa, work: Work, tmp_path: Path):
    own = tmp_path / "mine" / "algorithm"
    own.mkdir(parents=True)
    (own / "cautious.yaml").write_text("defaults: [default]\nclip_ratio_high: 0.05\n")
    assert mappa("fit", "--config-dir", "mine", "algorithm=cautious", "experiment=tiny_cpu") == 0
    (cfg,) = work.configs
    assert cfg.algorithm.clip_ratio_high == 0.05
    assert cfg.trainer.max_steps == 6


def test_a_users_class_in_the_current_folder(mappa: Mappa, work: Work, tmp_path: Path, capsys: Any):
    (tmp_path / "my_own_coach.py").write_text("class Stern:\n    def __init__(self, strict=1): ...\n")
    (tmp_path / "mine" / "coach").mkdir(parents=True)
    (tmp_path / "mine" / "coach" / "stern.yaml").write_text("_target_: my_own_coach.Stern\n")
    given = ("fit", "--config-dir", "mine", "coach=stern")
    assert mappa(*given, "+coach.strict=2") == 0
    assert mappa(*given, "+coach.strickt=2") == 2
    assert "coach.strickt is no parameter of my_own_coach.Stern; did you mean strict?" in capsys.readouterr().err
    assert len(work.configs) == 1


def test_evaluation_uses_the_runs_config_and_what_is_overridden(mappa: Mappa, work: Work, tmp_path: Path):
    run = saved_run(tmp_path / "a run", work, mappa)
    question = "what is ${x}, (3 + 4) = '7'?"
    assert mappa("predict", str(run), question, "datamodule.val_temperature=0.1", "task=math_file", "task.path=f") == 0
    (cfg,) = work.configs
    assert cfg.trainer.max_steps == 7
    assert cfg.datamodule.val_temperature == 0.1
    assert (cfg.run, cfg.inputs) == (str(run), question)
    assert cfg.task == {"_target_": "lightning_mappa.tasks.math_file.MathFile", "path": "f", "seed": 0}


def test_resume_goes_on_with_the_runs_config(mappa: Mappa, work: Work, tmp_path: Path):
    run = saved_run(tmp_path / "run", work, mappa)
    assert mappa("fit", f"resume={run}", "trainer.max_steps=9") == 0
    assert work.configs[0].trainer.max_steps == 9
    assert work.configs[0].resume == str(run)


def test_what_makes_the_system_cannot_be_changed_afterwards(mappa: Mappa, work: Work, tmp_path: Path, capsys: Any):
    run = saved_run(tmp_path / "run", work, mappa)
    assert mappa("test", str(run), "optimizer.lr=1") == 2
    assert f"optimizer.lr=1 cannot be changed: it belongs to run={run}" in capsys.readouterr().err


# -- errors and exit codes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["fit", "+typo=1"], r"typo is no known key \(given: 1\).*allowed at the top level: seed"),
        (["fit", "trainer.max_step=3"], r"trainer.max_step is no known key \(given: '3'\); did you mean max_steps\?"),
        (["fit", "+trainer.max_step=3"], r"trainer.max_step is no known key .*did you mean max_steps\?"),
        (["fit", "+agents.solver.turns=3"], r"agents.solver.turns is no known key .*allowed at agents.solver: role"),
        (["fit", "trainer.max_steps=many"], r"trainer.max_steps: Value 'many' .* could not be converted to Integer"),
        (["fit", "model=tinny"], r"model has no option 'tinny'; allowed: .*tiny"),
        (["fit", "engine=vllm"], r"engine=vllm works in actors of its own, but runtime is local; set runtime=ray"),
        (["fit", "strategy=fsdp"], r"strategy=fsdp is not available in this version; allowed: single_device"),
        (["fit", "model=hf"], r"model.path has no value: give model.path=…"),
        (["fit", "seed=[1"], r"no viable alternative at input '\[1'"),
        (["fit", "oops"], r"'oops' is no override \(key=value\)"),
        (["fit", "~callbacks.nothing"], r"'callbacks.nothing' does not exist"),
        (["fit", "trainer=1"], r"must be a string"),
        (["fit", "resume=nowhere"], r"resume=nowhere is no run folder"),
        (["fit", "--config-dir", "nowhere"], r"config directory .*nowhere' not found"),
        (["fit", "-m", "seed=0,1", "+typo=1"], r"typo is no known key"),
        (["test"], r"run is not given; allowed: mappa test RUN"),
        (["test", "nowhere"], r"run=nowhere is no run folder"),
        (["predict", "run"], r"inputs is not given; allowed: mappa predict RUN INPUTS"),
    ],
)
def test_a_users_mistake_is_one_sentence_and_leaves_no_run(
    mappa: Mappa, work: Work, tmp_path: Path, capsys: Any, arguments: list[str], sentence: str
):
    assert mappa(*arguments) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("mappa: ")]
    assert re.search(sentence, lines[0])
    assert not work.configs
    assert [path.name for path in tmp_path.glob("runs/*/*")] in ([], ["multirun.yaml"])


def raises(error: Exception) -> Callable[[DictConfig], Any]:
    def act(cfg: DictConfig) -> Any:
        raise error

    return act


def test_errors_of_ours_are_one_line_with_their_exit_code(mappa: Mappa, work: Work, capsys: Any):
    work.act = raises(InfrastructureError("the disk is full"))
    assert mappa("fit") == 6
    assert capsys.readouterr().err == "mappa: the disk is full\n"


def test_a_bug_shows_its_traceback(mappa: Mappa, work: Work, capsys: Any):
    work.act = raises(ZeroDivisionError("oh"))
    assert mappa("fit") == 1
    shown = capsys.readouterr().err
    assert shown.startswith("Traceback")
    assert "ZeroDivisionError: oh" in shown


def test_hydras_variable_shows_the_traceback_of_a_users_mistake(mappa: Mappa, work: Work, capsys: Any):
    work.act = raises(ConfigError("not so"))
    assert mappa("fit", full_error="1") == 2
    assert capsys.readouterr().err.startswith("Traceback")


# -- sweeps ---------------------------------------------------------------------------------------------------


def test_a_sweep_numbers_its_runs_below_one_folder(mappa: Mappa, work: Work, tmp_path: Path):
    assert mappa("fit", "-m", "seed=3,4") == 0
    assert [cfg.seed for cfg in work.configs] == [3, 4]
    first, second = (Path(cfg.output_dir) for cfg in work.configs)
    assert (first.name, second.name) == ("0", "1")
    assert first.parent == second.parent
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()] == [
        f"{first.parent}/multirun.yaml"
    ]


def test_a_sweep_from_a_file(mappa: Mappa, work: Work):
    assert mappa("fit", "sweep=seeds") == 0
    assert [cfg.seed for cfg in work.configs] == [0, 1, 2, 3, 4]


def test_a_failed_job_gives_the_sweep_its_exit_code_after_all_jobs_ran(mappa: Mappa, work: Work, capsys: Any):
    work.act = lambda cfg: raises(InfrastructureError("gone"))(cfg) if cfg.seed == 0 else 0.5
    assert mappa("fit", "-m", "seed=0,1") == 6
    assert len(work.configs) == 2
    assert "mappa: gone" in capsys.readouterr().err


def test_a_signal_ends_the_whole_sweep(mappa: Mappa, work: Work):
    work.act = raises(Preempted("stopped"))
    assert mappa("fit", "-m", "seed=0,1") == 3
    assert len(work.configs) == 1


@pytest.mark.parametrize(
    ("result", "number"),
    [({"val": {"success": {"selected": 0.25}}}, 0.25), ({"val.success.selected": 1}, None), (0.5, 0.5), (None, None)],
)
def test_what_a_sweeper_optimises(result: Any, number: float | None):
    assert cli.objective(result, "val.success.selected") == number
