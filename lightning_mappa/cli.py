"""`mappa fit | plan | validate | …`: from a command line to one checked config and exit code."""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from lightning_mappa.bounds import CHOICES
from lightning_mappa.checks import check, check_folders
from lightning_mappa.config import run_folder_name, structured, unknown_key
from lightning_mappa.errors import ConfigError, ExitCode, InfrastructureError, MappaError, NotAvailableError
from lightning_mappa.saved_config import saved_config
from lightning_mappa.scale_checks import check_packages

COMMANDS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "fit": ("lightning_mappa.fit", ()),
    "validate": ("lightning_mappa.evaluate", ("run",)),
    "test": ("lightning_mappa.evaluate", ("run",)),
    "predict": ("lightning_mappa.evaluate", ("run", "inputs")),
    "audit": ("lightning_mappa.audit.audit", ()),
    "plan": ("lightning_mappa.plan.plan", ()),
    "export": ("lightning_mappa.export", ("run",)),
    "recoach": ("lightning_mappa.recoach.recoach", ("run",)),
}
"""Command -> (the module with its function, imported when it runs; the keys its positional arguments set)."""
SHOWS = ("plan",)
"""Has done its work once it has printed it."""
PLAIN_COMMANDS: Mapping[str, str] = {"doctor": "lightning_mappa.doctor", "compare": "lightning_mappa.compare.compare"}
"""Command without a config -> the module with its function, which takes the arguments and returns an exit code."""

USAGE = """\
usage: mappa fit [overrides]
       mappa plan [plan.json=true] [overrides]
       mappa validate RUN [overrides]
       mappa test RUN [overrides]
       mappa predict RUN QUESTION_OR_FILE [overrides]
       mappa export RUN [agent=NAME] [version=N|selected|last] [to=FOLDER]
       mappa audit [coach=OPTION] [held_out=true] [overrides]
       mappa recoach RUN [coach=OPTION] [coach.rubric=NAME] [algorithm.KEY=VALUE] [recoach.KEY=VALUE]
       mappa compare RUN ... [--json] [--plot FILE]
       mappa doctor [--json] [tools.python.KEY=VALUE]
An override is key=value or group=option; `mappa fit --help` lists them, -m sweeps over a,b."""

SHORT: Mapping[str, Mapping[str, str]] = {"export": {name: f"export.{name}" for name in ("agent", "version", "to")}}
"""Command -> names that stand for keys of its own, where the name alone would be another key or a group."""

FULL_ERROR = "HYDRA_FULL_ERROR"
FIXED = ("seed", "agents", "model", "prompts", "workflow", "strategy", "optimizer", "experiment", "sweep")
"""What a run has once for all: `mappa test RUN` and `resume=RUN` cannot change it."""

OPTIONS_WITH_VALUE = (
    *("--config-dir", "-cd", "--config-path", "-cp", "--config-name", "-cn"),
    *("--cfg", "-c", "--package", "-p", "--experimental-rerun"),
)
OVERRIDE = re.compile(r"~[\w./@:-]+|\+{0,2}[\w./@:-]+=")


class JobFailed(Exception):
    """A job of a sweep that has already said why: carries its exit code through the sweeper."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code


def main() -> NoReturn:
    """The console script. Exit codes: `errors.ExitCode`; 2 also for a usage error."""
    command, *arguments = sys.argv[1:] or [""]
    if command not in COMMANDS and command not in PLAIN_COMMANDS:
        print(USAGE, file=sys.stderr)
        sys.exit(ExitCode.CONFIG)
    # A console script has no current folder on its path; appended, so that it shadows nothing installed.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    # Read when torch is loaded, which is later: threads that spin while they wait starve any other process.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    in_full = os.environ.get(FULL_ERROR) == "1"
    # Hydra would print errors its own way and exit with 1; with this set it hands them on.
    os.environ[FULL_ERROR] = "1"
    try:
        refuse_missing_links()
        if command in PLAIN_COMMANDS:
            try:
                sys.exit(getattr(import_module(PLAIN_COMMANDS[command]), command)(arguments))
            finally:
                sys.stdout.flush()
        sys.argv = [f"mappa {command}", *name_positionals(command, arguments)]
        entry = hydra.main(config_path="pkg://lightning_mappa.conf", config_name=command, version_base="1.3")
        entry(job(command, in_full))()
        sys.stdout.flush()
    except JobFailed as failed:
        sys.exit(failed.exit_code)
    except BrokenPipeError:
        drop_output()
        sys.exit(ExitCode.DONE)
    except (MappaError, HydraException, OmegaConfBaseException, ValueError) as error:
        # Jobs report their own errors: what arrives here was raised while the config was composed.
        sys.exit(report(explain(error, sys.argv[1:]), in_full))
    sys.exit(ExitCode.DONE)


def refuse_missing_links() -> None:
    """A checkout without the three links of the layout runs only once it is installed."""
    for name in ("callbacks", "conf", "datamodules"):
        if find_spec(f"lightning_mappa.{name}") is None:
            raise ConfigError(
                f"lightning_mappa.{name} is not there: this checkout lacks the link lightning_mappa/{name} -> "
                f"../{name}; check out with core.symlinks=true, or run `pip install -e .`"
            )


def job(command: str, in_full: bool) -> Callable[[DictConfig], float | None]:
    """What Hydra runs with the composed config, once or per job of a sweep."""

    def run(cfg: DictConfig) -> float | None:
        sweep = HydraConfig.get().mode is RunMode.MULTIRUN
        try:
            checked = prepare(command, cfg)
            function = getattr(import_module(COMMANDS[command][0]), command)
            return objective(function(checked), checked.optimized_metric)
        except Exception as error:
            if isinstance(error, BrokenPipeError):
                drop_output()
                if command in SHOWS:
                    sys.exit(ExitCode.DONE)
                error = InfrastructureError(f"nobody reads the output of mappa {command} any more")
            code = report(error, in_full)
            if sweep and code is not ExitCode.PREEMPTED:
                raise JobFailed(code) from None
            # Not an Exception: Hydra reports nothing of its own, and a sweep that was told to stop does.
            sys.exit(code)

    return run


def drop_output() -> None:
    """As after `mappa plan | head`: what has been read was enough, and what is in the buffer would fail at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def prepare(command: str, cfg: DictConfig) -> DictConfig:
    """The config that `command` runs with: structured, complete, checked, with its run folder named."""
    places = COMMANDS[command][1]
    for key in places:
        if OmegaConf.is_missing(cfg, key):
            raise ConfigError(f"{key} is not given; allowed: mappa {command} {' '.join(places).upper()}")
    job_config = HydraConfig.get()
    if cfg.get("run") is not None or cfg.get("resume") is not None:
        # Unresolved, because reading an item would take the escape from an escaped `${`.
        overrides: Any = OmegaConf.to_container(job_config.overrides.task, resolve=False)
        cfg = of_run(cfg, overrides)
    elif command in ("fit", "audit"):
        sweep = job_config.mode is RunMode.MULTIRUN
        cfg.output_dir = run_folder_name(
            cfg,
            job_config.job.num if sweep else None,
            sweep_dir=job_config.sweep.dir if sweep else None,
        )
    cfg = structured(cfg)
    check(cfg)
    if command == "fit":
        check_packages(cfg)
        check_folders(cfg)
    return cfg


def of_run(cfg: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """The config of the run that `run` or `resume` names, with what the command line overrides in it."""
    source = "run" if cfg.get("run") is not None else "resume"
    file = Path(cfg[source]) / "config.yaml"
    if not file.is_file():
        raise ConfigError(f"{source}={cfg[source]} is no run folder: it holds no config.yaml")
    saved = saved_config(file)
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        key = override.key_or_group
        if override.is_delete() or override.package is not None or key.partition(".")[0] in FIXED:
            raise ConfigError(f"{override.input_line} cannot be changed: it belongs to {source}={cfg[source]}")
        # A group's option is a whole node of the composed config, anything else is the value as it was written.
        value, node = override.value(), OmegaConf.select(cfg, key)
        option = isinstance(node, DictConfig) and not isinstance(value, Mapping)
        OmegaConf.update(saved, key, node if option else value, merge=not option, force_add=True)
    return saved


def name_positionals(command: str, arguments: Sequence[str]) -> list[str]:
    """`RUN` and `QUESTION` as the overrides `run=…` and `inputs=…`, short names in full; everything else as it is."""
    _, keys = COMMANDS[command]
    short = SHORT.get(command, {})
    given = [argument.partition("=")[0] for argument in arguments if "=" in argument]
    free = [key for key in keys if key not in given]
    named = []
    after_option = False
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if equals and name in short and not after_option:
            named.append(f"{short[name]}={value}")
        elif after_option or argument.startswith("-") or OVERRIDE.match(argument):
            named.append(argument)
        elif free:
            named.append(f"{free.pop(0)}={quote(argument)}")
        else:
            raise ConfigError(f"{argument!r} is no override (key=value) and mappa {command} takes no more arguments")
        after_option = argument in OPTIONS_WITH_VALUE
    return named


def quote(text: str) -> str:
    """`text` as a quoted value of Hydra's override grammar, without meaning for sweeps or interpolation."""
    # Backslashes are literal there, except in front of a quote, at the end, and before `${`.
    escaped = re.sub(r"(\\*)\$\{", lambda found: 2 * found[1] + r"\${", text)
    escaped = re.sub(r"(\\*)'", lambda found: 2 * found[1] + r"\'", escaped)
    escaped = re.sub(r"(\\+)\Z", lambda found: 2 * found[1], escaped)
    return f"'{escaped}'"


def report(error: Exception, in_full: bool) -> ExitCode:
    """Says on stderr what went wrong, in one line where it is no bug, and returns the exit code."""
    if isinstance(error, MappaError) and not in_full:
        print(f"mappa: {error}", file=sys.stderr)
    else:
        traceback.print_exception(error)
    return error.exit_code if isinstance(error, MappaError) else ExitCode.BUG


def explain(error: Exception, arguments: Sequence[str]) -> Exception:
    """The one sentence behind an error that Hydra raised while it composed the config."""
    if isinstance(error, MappaError):
        return error
    sentence: Exception
    cause = error.__cause__
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        group, _, name = error.missing_cfg_file.rpartition("/")
        sentence = _no_option(group, name, error.options)
    elif isinstance(cause, (ConfigAttributeError, ConfigKeyError)) and cause.full_key:
        given = [value for key, _, value in (a.partition("=") for a in arguments) if key == cause.full_key]
        sentence = unknown_key(cause.full_key.split("."), *given[:1])
    else:
        lines = [line.strip() for line in str(error).splitlines() if "hydra.cc" not in line and line.strip()]
        sentence = ConfigError("; ".join(lines))
    sentence.__cause__ = error
    return sentence


def _no_option(group: str, name: str, options: Sequence[str]) -> ConfigError:
    later = next((later for key, (_, later) in CHOICES.items() if key.partition(".")[0] == group), ())
    allowed = ", ".join(options)
    if name in later:
        return NotAvailableError(f"{group}={name} is not available in this version; allowed: {allowed}")
    return ConfigError(f"{group} has no option {name!r}; allowed: {allowed}")


def objective(result: Any, metric: str) -> float | None:
    """The number a sweeper optimises: `metric` (dotted) of what the command returned."""
    if not isinstance(result, Mapping):
        return result
    found = OmegaConf.select(OmegaConf.create(dict(result)), metric)
    return None if found is None else float(found)
