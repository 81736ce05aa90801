"""From a config node with `_target_` to the object, with one clear sentence when the node is wrong."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lightning_mappa.errors import ConfigError, MappaError

DIRECTIVES = ("_target_", "_partial_")
"""`_partial_: true` gives a function that waits for the remaining arguments."""

READ_BY_THE_RUN: Mapping[str, Collection[str]] = {
    "coach": (
        *("min_audit", "audit_cases", "audit_budget_usd", "audit_budget_calls"),
        *("max_missing_rate", "missing_window"),
    )
}
"""Where a node stands -> keys in it that are for the run (`audit.floor`, `MissingWatch`) and not for the target."""


def build(node: DictConfig | Mapping[str, Any], key: str, /, **supplied: Any) -> Any:
    """Calls `_target_` with the node's other keys and with `supplied`, what the run itself knows.

    `key` is where the node stands in the config. Nodes inside it that have a `_target_` are built first.

    Raises `ConfigError` for a target that cannot be imported, a key it does not take, an argument it lacks
    and a value it refuses. Errors of this package pass through as they are.
    """
    plain: Any = OmegaConf.to_container(node, resolve=True) if isinstance(node, DictConfig) else node
    target = check_target(plain, key, supplied=supplied)
    others = (*DIRECTIVES, *READ_BY_THE_RUN.get(key, ()))
    arguments = {name: _value(value, f"{key}.{name}") for name, value in plain.items() if name not in others}
    call = functools.partial(target, **arguments, **supplied)
    if plain.get("_partial_"):
        return call
    try:
        return call()
    except Exception as error:
        if isinstance(error, MappaError) or not _refused(error):
            raise
        raise ConfigError(f"{key}: {' '.join(str(error).split())}") from error


def check_target(node: Mapping[Any, Any], key: str, *, supplied: Collection[str] | None = None) -> Callable[..., Any]:
    """The callable that `_target_` names, after a look at the node's keys against its signature.

    With `supplied`, the names of the run's own arguments, a missing argument is refused as well.
    """
    target = locate(str(node.get("_target_", "")), key)
    parameters = _parameters(target)
    if parameters is None:
        return target
    given = [str(name) for name in node if name not in (*DIRECTIVES, *READ_BY_THE_RUN.get(key, ()))]
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        for name in given:
            if name not in named:
                close = difflib.get_close_matches(name, named, n=1)
                hint = f"did you mean {close[0]}? " if close else ""
                allowed = ", ".join(named) or "none"
                raise ConfigError(f"{key}.{name} is no parameter of {node['_target_']}; {hint}allowed: {allowed}")
    if supplied is not None:
        for name in given:
            if name in supplied:
                raise ConfigError(f"{key}.{name} is set by the run itself: take it out of the config")
        required = [p.name for p in parameters if p.default is p.empty and p.name in named]
        lacking = [name for name in required if name not in given and name not in supplied]
        if lacking and not node.get("_partial_"):
            raise ConfigError(f"{key}.{lacking[0]} has no value, and {node['_target_']} needs one")
    return target


def locate(path: str, key: str) -> Callable[..., Any]:
    """Imports `package.module.Name`; `ConfigError` names the part that is not there."""
    parts = path.split(".")
    if len(parts) < 2 or not all(parts):
        raise ConfigError(f"{key}._target_ is {path!r}; give the import path of a class or function")
    for count in range(len(parts) - 1, 0, -1):
        module_name = ".".join(parts[:count])
        try:
            found: Any = import_module(module_name)
        except ModuleNotFoundError as error:
            # A module that is there but imports another one that is not must not look like a wrong path.
            if error.name is None or not (module_name + ".").startswith(error.name + "."):
                raise ConfigError(f"{key}._target_: {module_name} needs the module {error.name}") from error
            continue
        for name in parts[count:]:
            if not hasattr(found, name):
                raise ConfigError(f"{key}._target_ is {path}, but {module_name} has no {name}")
            found = getattr(found, name)
        if not callable(found):
            raise ConfigError(f"{key}._target_ is {path}, which is a {type(found).__name__} and cannot be called")
        return found
    raise ConfigError(
        f"{key}._target_ is {path}, but there is no module {parts[0]}; the current folder was searched too"
    )


def _refused(error: Exception) -> bool:
    """Whether a constructor said no to what it was given, and did not merely fail."""
    from lightning.fabric.utilities.exceptions import MisconfigurationException

    return isinstance(error, (ValueError, OSError, ModuleNotFoundError, MisconfigurationException))


def _parameters(target: Callable[..., Any]) -> list[inspect.Parameter] | None:
    try:
        return list(inspect.signature(target).parameters.values())
    except ValueError:
        return None


def _value(value: Any, key: str) -> Any:
    if isinstance(value, Mapping):
        if "_target_" in value:
            return build(value, key)
        return {name: _value(inner, f"{key}.{name}") for name, inner in value.items()}
    if isinstance(value, list):
        return [_value(inner, f"{key}[{index}]") for index, inner in enumerate(value)]
    return value
