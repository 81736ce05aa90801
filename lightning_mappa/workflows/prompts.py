"""From what an agent may know to what it reads: templates, thinking left out, tool output cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jinja2 import StrictUndefined, TemplateSyntaxError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lightning_mappa.errors import ConfigError
from lightning_mappa.types import Task, ToolResult
from lightning_mappa.workflows.base import Message

THINK, THINK_END = "<think>", "</think>"
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


def observation(results: Sequence[ToolResult], template: PromptTemplate, limit: int) -> str:
    """What the agent is shown of its tool runs; the template reads all as `results`, the last as `result`.

    stdout and stderr are cut to `limit` characters each.
    """
    shown = [replace(r, stdout=head_and_tail(r.stdout, limit), stderr=head_and_tail(r.stderr, limit)) for r in results]
    return template.render(results=shown, result=shown[-1])


def tool_output(result: ToolResult, limit: int) -> str:
    """What later agents are shown of a run: its stdout, after a failure also stderr and what went wrong."""
    parts = [result.stdout.strip()]
    if not result.ok:
        parts += [result.stderr.strip(), f"[{result.status}] {result.reason}".rstrip()]
    return head_and_tail("\n".join(part for part in parts if part), limit)


def head_and_tail(text: str, limit: int) -> str:
    """`text`, or when longer than `limit` characters its two ends, with a line that counts what is left out.

    The two ends have `limit` characters together; the line comes on top.
    """
    omitted = len(text) - limit
    if omitted <= 0:
        return text
    head = (limit + 1) // 2
    return f"{text[:head]}\n… {omitted} characters left out …\n{text[head + omitted :]}"


def strip_thinking(text: str) -> str:
    """`text` without its thinking and without surrounding space.

    Thinking is what stands between the tags; what precedes a closing tag that was never opened (the prompt
    opened it); and what follows an opening tag that is never closed.
    """
    parts, rest = [], text
    while THINK in rest:
        before, _, after = rest.partition(THINK)
        parts.append(before)
        _, _, rest = after.partition(THINK_END)
    return "".join([*parts, rest]).rpartition(THINK_END)[2].strip()
