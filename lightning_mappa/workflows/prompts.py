"""From what an agent may know to what it reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import StrictUndefined, TemplateSyntaxError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lightning_mappa.errors import ConfigError
from lightning_mappa.types import Task, ToolResult
from lightning_mappa.workflows.base import Message

_ENVIRONMENT = ImmutableSandboxedEnvironment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskView:
    """What a template may read of a task: there is no way from here to the reference."""

    prompt: str
    metadata: Mapping[str, Any]


class PromptTemplate:
    """A Jinja template, compiled once. `key` is where the user wrote it and `agent_id` for whom, for errors.

    Sandboxed and strict: an undefined variable raises `ConfigError`, as does any other fault of the template.
    """

    def __init__(self, source: str, *, agent_id: str, key: str) -> None:
        self._where = f"{key} (agent {agent_id})"
        try:
            self._template = _ENVIRONMENT.from_string(source)
        except TemplateSyntaxError as error:
            raise ConfigError(f"{self._where}, line {error.lineno} of the template: {error.message}") from error

    def render(self, **variables: Any) -> str:
        try:
            return self._template.render(**variables)
        except Exception as error:  # a user's template can raise anything
            allowed = ", ".join(sorted(variables))
            raise ConfigError(f"{self._where}: {error}; allowed variables are {allowed}") from error


def user_prompt(template: PromptTemplate, task: Task, seen: Sequence[Message], extra: Mapping[str, Any]) -> str:
    """An agent's `user` template over `task` (prompt and metadata only), `seen` and `extra`."""
    view = TaskView(prompt=task.prompt, metadata=task.metadata)
    return template.render(**{**extra, "task": view, "seen": list(seen)})


def observation(results: Sequence[ToolResult], template: PromptTemplate) -> str:
    """What the agent is shown of its tool runs; the template reads all as `results`, the last as `result`."""
    return template.render(results=results, result=results[-1])


def tool_output(result: ToolResult) -> str:
    """What later agents are shown of a run: its stdout, after a failure also stderr and what went wrong."""
    parts = [result.stdout.strip()]
    if not result.ok:
        parts += [result.stderr.strip(), f"[{result.status}] {result.reason}".rstrip()]
    return "\n".join(part for part in parts if part)
