"""What decides an audit, as one hash: under it a coach that has passed is remembered."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import inspect
import json
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lightning_mappa.audit.cases import AuditCase
from lightning_mappa.build import READ_BY_THE_RUN, locate
from lightning_mappa.coaches.prompt import read_rubric

VERSION = 3
"""Of the audit: one more whenever it asks or judges otherwise."""

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

_JUDGES = ("coaches.", "tasks.", "file_trail", "thinking", "tools.outcome", "workflows.file_relay")
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
    if "_target_" not in node:
        return ""
    target = locate(str(node["_target_"]), "coach")
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
    """Of a folder, as a model is one, names, sizes and times: it may be too large to be read."""
    try:
        path = Path(value)
        if path.is_file():
            return hashlib.sha256(path.read_bytes()).hexdigest()
        if path.is_absolute() and path.is_dir():
            files = [(file, file.stat()) for file in sorted(path.rglob("*")) if file.is_file()]
            return [value, [[str(file.relative_to(path)), at.st_size, at.st_mtime_ns] for file, at in files]]
    except (OSError, ValueError):  # a text that is no path
        pass
    return value


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
        yield from (sys.modules[name] for name in names if name in sys.modules)


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
