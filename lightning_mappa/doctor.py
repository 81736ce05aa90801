"""`mappa doctor`: can this machine run the default `mappa fit`, what else is there, and how to get what is not."""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.resources
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from packaging.requirements import Requirement

from lightning_mappa.build import build
from lightning_mappa.errors import ConfigError, ExitCode, MappaError
from lightning_mappa.models import smollm2

if TYPE_CHECKING:
    from lightning_mappa.tools.python import PythonTool

DISTRIBUTION = "lightning-mappa"
TOOL_KEY = "tools.python"
KEYS = {
    "ANTHROPIC_API_KEY": "only a coach that asks Anthropic's models needs one",
    "HF_TOKEN": "only a gated model of the Hugging Face hub needs one",
}
NOT_SHOWN = ("dev",)
WARM = "warm interpreter"
MIN_FREE_MB, GOOD_FREE_MB = 200, 5000
"""What the default run writes, with a margin; what a run with `model=smollm2` and its cache take."""
GOOD_SHARED_MB = 1000


class State(StrEnum):
    OK = "ok"
    MISSING = "missing"
    """Some runs need it, the default `mappa fit` does not."""
    FAILED = "failed"
    """The default `mappa fit` cannot run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    section: str
    name: str
    state: State = State.OK
    found: str = ""
    fix: str = ""
    """What to do; empty where nothing is missing."""


def doctor(arguments: Sequence[str]) -> ExitCode:
    """Prints what was found, and returns 0 when the default `mappa fit` can run, else 6.

    `arguments` are `--json` and overrides of the Python tool, `tools.python.isolation=landlock`.

    Raises:
        ConfigError: another argument.
    """
    overrides = [argument for argument in arguments if argument != "--json"]
    installed = list(packages())
    checks = [*sandbox(overrides, installed), *installed, *keys(), *disk(), *machine()]
    ready = all(check.state is not State.FAILED for check in checks)
    if "--json" in arguments:
        print(json.dumps({"ready": ready, "checks": [asdict(check) for check in checks]}, indent=2))
    else:
        print(report(checks, ready))
    return ExitCode.DONE if ready else ExitCode.INFRASTRUCTURE


def tool_of(overrides: Sequence[str]) -> PythonTool:
    """The Python tool as its config says, with `overrides`."""
    from lightning_mappa.tools.python import PythonTool

    for override in overrides:
        if not override.startswith(f"{TOOL_KEY}.") or "=" not in override:
            raise ConfigError(f"mappa doctor takes --json and {TOOL_KEY}.KEY=VALUE, not {override!r}")
    file = importlib.resources.files("lightning_mappa.conf") / "tool" / "python.yaml"
    node = OmegaConf.create(file.read_text(encoding="utf-8"))
    try:
        given = OmegaConf.from_dotlist([override.removeprefix(f"{TOOL_KEY}.") for override in overrides])
    except OmegaConfBaseException as error:
        raise ConfigError(f"{TOOL_KEY}: {error}") from error
    merged = OmegaConf.merge(node, given)
    assert isinstance(merged, DictConfig)
    tool = build(merged, TOOL_KEY)
    if not isinstance(tool, PythonTool):
        raise ConfigError(f"{TOOL_KEY}._target_={merged._target_}: mappa doctor looks at PythonTool only")
    return tool


def sandbox(overrides: Sequence[str], installed: Iterable[Check]) -> Iterator[Check]:
    if any(check.state is State.FAILED for check in installed):
        fix = "first install the packages that are failed below"
        yield Check(section="sandbox", name="tier", state=State.FAILED, found="not probed", fix=fix)
        return
    # Here, because without those packages it cannot be imported.
    from lightning_mappa.tools.probes import run_probes

    tool = tool_of(overrides)
    try:
        tier = tool.check()
        probed = asyncio.run(run_probes(tool))
    except MappaError as error:
        yield Check(section="sandbox", name="tier", state=State.FAILED, found="none holds", fix=str(error))
        return
    finally:
        tool.close()
    # With no isolation because it was asked for in words, a run can start.
    asked = tool.isolation == "none"
    state = State.MISSING if asked else State.FAILED
    advice = "set it to auto" if asked else "do not train in this one; try bubblewrap or landlock"
    fix = f"{TOOL_KEY}.isolation={tool.isolation}: {advice}"
    if asked:
        yield Check(section="sandbox", name="tier", state=state, found=tier, fix=fix)
    else:
        yield Check(section="sandbox", name="tier", found=tier)
    for field in fields(tool.limits):
        yield Check(section="sandbox", name=f"limit {field.name}", found=f"{getattr(tool.limits, field.name)}")
    yield Check(section="sandbox", name="programs at a time", found=str(tool.max_concurrency))
    for name, reason in probed.items():
        if reason:
            yield Check(section="sandbox", name=name, state=state, found=reason, fix=fix)
        else:
            yield Check(section="sandbox", name=name, found="holds")
    yield _warm(overrides)


def _warm(overrides: Sequence[str]) -> Check:
    """Whether programs could find modules imported; asked of an interpreter with one that every Python has."""
    tool = tool_of([*overrides, f"{TOOL_KEY}.warm=[json]"])
    try:
        tool.check()
    except ConfigError as error:
        reason = str(error).removeprefix(f"{TOOL_KEY}.warm=[json]: ")
        return Check(section="sandbox", name=WARM, state=State.MISSING, found="not here", fix=reason)
    finally:
        tool.close()
    return Check(section="sandbox", name=WARM, found="can be had")


def packages() -> Iterator[Check]:
    """Against what this package's own metadata asks for; nothing is imported."""
    try:
        requirements = [Requirement(line) for line in importlib.metadata.requires(DISTRIBUTION) or ()]
    except importlib.metadata.PackageNotFoundError:
        fix = "pip install -e . in the checkout"
        yield Check(section="packages", name=DISTRIBUTION, state=State.MISSING, found="not installed", fix=fix)
        return
    extras = importlib.metadata.metadata(DISTRIBUTION).get_all("Provides-Extra") or []
    yield from (_package(requirement, "") for requirement in requirements if _applies(requirement, ""))
    for extra in extras:
        if extra not in NOT_SHOWN:
            mine = (r for r in requirements if _applies(r, extra) and not _applies(r, ""))
            yield from (_package(requirement, extra) for requirement in mine)
    yield _smollm2()


def _applies(requirement: Requirement, extra: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def _package(requirement: Requirement, extra: str) -> Check:
    state = State.MISSING if extra else State.FAILED
    source = f"'{DISTRIBUTION}[{extra}]'" if extra else f"'{requirement.name}{requirement.specifier}'"
    fix = f"pip install {source}"
    try:
        version = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        return Check(section="packages", name=requirement.name, state=state, found="not installed", fix=fix)
    if not requirement.specifier.contains(version, prereleases=True):
        found = f"{version}, wanted is {requirement.specifier}"
        return Check(section="packages", name=requirement.name, state=state, found=found, fix=fix)
    return Check(section="packages", name=requirement.name, found=version)


def _smollm2() -> Check:
    name = f"{smollm2.PACKAGE} or its cache"
    if smollm2.is_cached():
        return Check(section="packages", name=name, found="converted, in the cache")
    for package in (smollm2.PACKAGE, "gguf"):
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found = f"{package} is not installed; only model=smollm2 needs it"
            return Check(section="packages", name=name, state=State.MISSING, found=found, fix=smollm2.INSTALL)
        if package == smollm2.PACKAGE and version != smollm2.VERSION:
            found = f"{version}, wanted is {smollm2.VERSION}"
            return Check(section="packages", name=name, state=State.MISSING, found=found, fix=smollm2.INSTALL)
    return Check(section="packages", name=name, found=f"{smollm2.VERSION}, to be converted on first use")


def keys() -> Iterator[Check]:
    """Whether they are there, and nothing of what they are."""
    for name, purpose in KEYS.items():
        if os.environ.get(name):
            yield Check(section="keys", name=name, found="present")
        else:
            fix = f"export {name}=...; {purpose}"
            yield Check(section="keys", name=name, state=State.MISSING, found="absent", fix=fix)


def disk() -> Iterator[Check]:
    """Free space where a run writes, at the next folder that exists already."""
    places = {"current folder": Path.cwd(), "temporary folder": Path(tempfile.gettempdir())}
    for name, place in {**places, "cache folder": smollm2.cache_root()}.items():
        there = next(folder for folder in (place, *place.parents) if folder.is_dir())
        free = shutil.disk_usage(there).free >> 20
        default_run = name in places
        state, fix = State.OK, ""
        if not os.access(there, os.W_OK | os.X_OK):
            state, fix = (State.FAILED if default_run else State.MISSING), "make it writable, or choose another"
        elif free < MIN_FREE_MB and default_run:
            state, fix = State.FAILED, f"free {MIN_FREE_MB - free} MB"
        elif free < GOOD_FREE_MB:
            state, fix = State.MISSING, f"model=smollm2 with its checkpoints takes about {GOOD_FREE_MB} MB"
        yield Check(section="disk", name=name, state=state, found=f"{free} MB free at {place}", fix=fix)


def machine() -> Iterator[Check]:
    usable, cores = len(os.sched_getaffinity(0)), os.cpu_count()
    yield Check(section="machine", name="cores", found=f"{usable} of {cores} usable")
    threads = os.environ.get("OMP_NUM_THREADS")
    yield Check(section="machine", name="threads", found=f"OMP_NUM_THREADS={threads}" if threads else "one per core")
    shared = Path("/dev/shm")
    free = shutil.disk_usage(shared).free >> 20 if shared.is_dir() else 0
    state, fix = State.OK, ""
    if free < GOOD_SHARED_MB:
        state, fix = State.MISSING, f"start the container with --shm-size={GOOD_SHARED_MB}m; only Ray uses it"
    yield Check(section="machine", name="shared memory", state=state, found=f"{free} MB free", fix=fix)


def report(checks: Iterable[Check], ready: bool) -> str:
    """A line per check below its section's name, with a second line for the fix."""
    lines: list[str] = []
    section = ""
    for check in checks:
        if check.section != section:
            section = check.section
            lines.append(section)
        lines.append(f"  {check.state:<8} {check.name:<24} {check.found}".rstrip())
        if check.fix:
            lines.append(f"  {'':<8} {'':<24} -> {check.fix}")
    verdict = "The default `mappa fit` can run." if ready else "The default `mappa fit` cannot run: see `failed`."
    return "\n".join([*lines, verdict])
