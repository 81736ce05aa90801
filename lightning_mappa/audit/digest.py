"""What decides an audit, as one hash: under it a coach that has passed is remembered."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import inspect
import json
import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lightning_mappa.audit.cases import AuditCase
from lightning_mappa.build import READ_BY_THE_RUN, locate
from lightning_mappa.coaches.prompt import read_rubric
from lightning_mappa.files import sha256

VERSION = 3
"""Of the audit: one more whenever it asks or judges otherwise."""

MAX_HASHED = 8 * 2**30
"""Bytes of one folder; some ten seconds of reading and hashing."""

_COACHES = "lightning_mappa.coaches."
_KEEPS_BOOKS = f"{_COACHES}guard.BudgetGuard"
_NO_VERDICT: Mapping[str, Collection[str]] = {
    f"{_COACHES}llm.LLMCoach": (
        *("deadline_s", "timeout_s", "max_attempts", "max_wait_s", "max_concurrency"),
        *("requests_per_minute", "tokens_per_minute"),
    ),
    f"{_COACHES}ensemble.EnsembleCoach": ("budget_usd", "budget_calls"),
    f"{_COACHES}cascade.CascadeCoach": ("budget_usd", "budget_calls"),
    f"{_COACHES}openai_compatible.OpenAICompatibleProvider": ("api_key_env", "check_model"),
    f"{_COACHES}vllm.VLLMProvider": ("num_engines", "kv_cache_gb", "gpu_memory_utilization", "start_s"),
}
"""Class → its parameters that say how calls are made, timed and paid for, and change no verdict."""

_JUDGES = (
    "coaches.",
    "tasks.",
    "file_trail",
    "thinking",
    "tools.outcome",
    "workflows.conversation",
    "workflows.file_relay",
)
_TRANSPORT = ("budget", "call_log", "caller", "guard", "loop_thread", "pace", "pricing", "reply_cache", "sdk", "watch")
"""Modules of this package that decide what a coach is shown and what it says, and those among the coaches' that do
not."""


def audit_digest(node: DictConfig, cases: Sequence[AuditCase]) -> str:
    """Of all that changes a verdict of the coach on these cases or what the audit makes of it, and of nothing else.

    That is: the coach's config (`judging`) with the text of its rubric and of other files that it names; the source
    of its classes and of what they import beside them, prompts among it; the cases as they are asked; `VERSION`.
    """
    coach = judging(node)
    sources = {name: text for target in sorted(set(_targets(coach))) for name, text in _sources(target)}
    content = [VERSION, _with_files(coach), sorted(sources.items()), [_as_asked(case) for case in cases]]
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:16]


def judging(node: DictConfig) -> dict[str, Any]:
    """A coach's config without budgets, paces, deadlines and the keys for `mappa fit`: coaches that are equal in what
    is left say the same of the same action."""
    plain: Any = OmegaConf.to_container(node, resolve=True)
    kept = {name: value for name, value in plain.items() if name not in READ_BY_THE_RUN["coach"]}
    found: dict[str, Any] = _decisive(kept)
    return found


def _decisive(node: Any) -> Any:
    if isinstance(node, list):
        return [_decisive(inner) for inner in node]
    if not isinstance(node, Mapping):
        return node
    name = _class_name(node)
    if name == _KEEPS_BOOKS:
        return None
    return {key: _decisive(inner) for key, inner in node.items() if key not in _NO_VERDICT.get(name, ())}


def _class_name(node: Mapping[str, Any]) -> str:
    """As the class is known where it is defined; its path in the config where it cannot be imported, as of the coach
    of an old run."""
    if "_target_" not in node:
        return ""
    path = str(node["_target_"])
    try:
        target = locate(path, "coach")
    except Exception:  # its module runs code of its own
        return path
    return f"{target.__module__}.{getattr(target, '__qualname__', '')}"


def _with_files(node: Any) -> Any:
    """With the content of every file that a value names in place of its path."""
    if isinstance(node, Mapping):
        rubric = node.get("rubric") if _class_name(node) == f"{_COACHES}llm.LLMCoach" else None
        inner = {key: _with_files(value) for key, value in node.items()}
        return inner if rubric is None else {**inner, "rubric": read_rubric(rubric)}
    if isinstance(node, list):
        return [_with_files(inner) for inner in node]
    return _content(node) if isinstance(node, str) else node


def _content(value: str) -> Any:
    """Of a file and of a folder, as a model is one, what is in it, wherever it lies; of what is no path the value."""
    try:
        path = Path(value)
        if path.is_file():
            return sha256(path)
        if path.is_dir() and _is_path(value):
            return _of_folder(path)
    except (OSError, ValueError):  # a text that is no path
        pass
    return value


def _is_path(value: str) -> bool:
    """A word may happen to be a folder's name, too: it names one where it looks like a path, or a model lies there."""
    return os.sep in value or any(Path(value).glob("*config.json"))


def _of_folder(path: Path) -> list[Any]:
    """Name, size and hash of every file. Above `MAX_HASHED` bytes the time of its last change in place of the hash:
    that would take minutes, and a model that is trained in place has another time. It is only asked for anew where
    the same files were copied."""
    files = sorted(file for file in path.rglob("*") if file.is_file())
    stats = [file.stat() for file in files]
    hashed = sum(stat.st_size for stat in stats) <= MAX_HASHED
    return [
        [str(file.relative_to(path)), stat.st_size, sha256(file) if hashed else stat.st_mtime_ns]
        for file, stat in zip(files, stats, strict=True)
    ]


def _as_asked(case: AuditCase) -> list[str]:
    changed = [repr(case.padded()), repr(case.injected())] if case.faults else []
    return [repr(case), *changed]


def _targets(node: Any) -> Iterator[str]:
    if isinstance(node, Mapping):
        if "_target_" in node:
            yield str(node["_target_"])
        for inner in node.values():
            yield from _targets(inner)
    elif isinstance(node, list):
        for inner in node:
            yield from _targets(inner)


def _sources(target: str) -> Iterator[tuple[str, str]]:
    """Name and hash of the target's module and of those that it imports, as far as they judge."""
    module = inspect.getmodule(locate(target, "coach"))
    waiting = [] if module is None else [module]
    seen: set[str] = set()
    while waiting:
        current = waiting.pop()
        file = getattr(current, "__file__", None)
        if current.__name__ in seen or file is None or not file.endswith(".py"):
            continue
        seen.add(current.__name__)
        text = Path(file).read_bytes()
        yield current.__name__, hashlib.sha256(text).hexdigest()
        waiting += [found for found in _imported(current, text) if _judges(found, beside=current)]


def _imported(module: ModuleType, text: bytes) -> Iterator[ModuleType]:
    for node in ast.walk(ast.parse(text)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            dotted = "." * node.level + (node.module or "")
            base = importlib.util.resolve_name(dotted, module.__package__ or "") if node.level else dotted
            names = [base, *(f"{base}.{alias.name}" for alias in node.names)]
        yield from (loaded for name in names if (loaded := _loaded(name)) is not None)


def _loaded(name: str) -> ModuleType | None:
    """One that judges and is imported where it is used is loaded here: whether it counts is no matter of what the
    process has done before."""
    package, _, inner = name.partition(".")
    if package == __name__.partition(".")[0] and inner.startswith(_JUDGES) and name not in sys.modules:
        with suppress(ModuleNotFoundError):  # the name of a class in a module
            importlib.import_module(name)
    return sys.modules.get(name)


def _judges(module: ModuleType, *, beside: ModuleType) -> bool:
    """Of this package what `_JUDGES` names; of others what is of the same package or lies beside the module that
    imports it, and is not merely installed there."""
    package, _, name = module.__name__.partition(".")
    if package == __name__.partition(".")[0]:
        return name.startswith(_JUDGES) and name.removeprefix("coaches.") not in _TRANSPORT
    if package == beside.__name__.partition(".")[0]:
        return True
    file, folder = (Path(getattr(found, "__file__", None) or "/") for found in (module, beside))
    return file.is_relative_to(folder.parent) and not {"site-packages", "dist-packages"} & set(file.parts)
