"""The pieces that a case is made of: sentences of ours, and data between fences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from lightning_mappa.coaches.parse import one_line
from lightning_mappa.file_trail import file_trail, folder_after, listing, missing
from lightning_mappa.tools.outcome import head_and_tail
from lightning_mappa.types import Action, ActionStatus, Episode, EpisodeStatus, ToolResult
from lightning_mappa.workflows.file_relay import Stage


@dataclass(frozen=True, slots=True)
class Data:
    label: str
    text: str


Part = str | Data


def step_parts(action: Action, limit: int, output_limit: int) -> Iterator[Part]:
    yield data("What the agent was asked and shown", action.prompt_text, limit)
    if action.status is ActionStatus.PROMPT_TOO_LONG:
        yield "It did not fit the agent's context: the agent wrote nothing."
        return
    cut = ", cut at its token limit" if action.truncated else ""
    yield data(f"What the agent wrote{cut}", action.text, limit)
    if action.status is ActionStatus.NO_CODE:
        yield "The agent has a tool, but wrote no program."
    for number, result in enumerate(action.tool_results, 1):
        yield from _tool(number, len(action.tool_results), result, output_limit)


def _tool(number: int, count: int, result: ToolResult, limit: int) -> Iterator[Part]:
    # No clock times: a resumed run writes the same cases, so that it need not pay for them again.
    code = "" if result.exit_code is None else f", exit code {result.exit_code}"
    yield f"Program {number} of {count} ended with status {result.status.value}{code}."
    if result.reason:
        yield data("Why", result.reason, limit)
    yield data("It printed", result.stdout, limit) if result.stdout else "It printed nothing."
    if result.stderr:
        yield data("Its errors and warnings", result.stderr, limit)
    if result.files:
        changes = [f"{change.path}: {change.event.value}, {change.size} bytes" for change in result.files]
        yield data("What it did to files, as the harness found them", "\n".join(changes), limit)


def folder_parts(episode: Episode, index: int, limit: int) -> Iterator[Part]:
    """What programs of earlier steps have left, and who wrote it; nothing where none has written a file."""
    trail = file_trail(episode.actions[:index])
    if trail:
        lines = listing(folder_after(episode.task.metadata.get("files", ()), trail))
        yield data("Files in the folder before this step, as the harness found them", "\n".join(lines), limit)


def requirement_parts(episode: Episode, index: int, stages: Mapping[str, Stage]) -> Iterator[Part]:
    """Which files the agent of a step was to find and to leave behind, and which of them were and are not there."""
    agent_id = episode.actions[index].agent_id
    if agent_id not in stages:
        return
    stage = stages[agent_id]
    begin = next(action.index for action in episode.actions if action.agent_id == agent_id)
    for text, wanted, count in (
        ("was to find: {}; when it began, {}.", stage.needs, begin),
        ("is to leave behind: {}; after this step, {}.", stage.makes, index + 1),
    ):
        if wanted:
            folder = folder_after(episode.task.metadata.get("files", ()), file_trail(episode.actions[:count]))
            lack = missing(wanted, folder)
            found = f"{', '.join(lack)} {'is' if len(lack) == 1 else 'are'} not there" if lack else "all are there"
            yield f"{agent_id} " + text.format(", ".join(wanted), found)


def outcome_parts(episode: Episode, limit: int, *, with_reference: bool) -> Iterator[Part]:
    yield "How the episode ended, as code has checked it (agents never see this):"
    if episode.status is EpisodeStatus.FAILED:
        yield data("It was cut short", episode.reason, limit)
    if episode.fault:
        yield data(f"What was handed in is refused ({episode.fault})", episode.reason, limit)
    if episode.answer is not None:
        yield data("The team's answer", episode.answer, limit)
    else:
        yield "The team gave no answer."
    if with_reference and episode.task.reference is not None:
        yield data("The reference", episode.task.reference, limit)
    measured = [f"{name} {value:.4g}" for name, value in episode.metrics.items() if not name.startswith("fair/")]
    if measured:
        yield f"Measured on what was handed in: {', '.join(measured)}."
    yield "Outcome: " + ("unknown" if episode.outcome is None else f"{episode.outcome:g} (0 wrong, 1 right)")


def file_list(files: Mapping[str, str] | Sequence[str]) -> str:
    if isinstance(files, Mapping):
        return "\n".join(f"{one_line(name)} (written by {one_line(author)})" for name, author in sorted(files.items()))
    return "\n".join(one_line(name) for name in sorted(files))


def data(label: str, text: str, limit: int) -> Data:
    # Lone surrogates cannot be sent, and some services refuse NUL.
    sendable = text.encode("utf-8", "replace").decode("utf-8").replace("\0", "\N{SYMBOL FOR NULL}")
    return Data(label, head_and_tail(sendable, limit))


def rendered(parts: Sequence[Part], token: str) -> str:
    return "\n\n".join(
        part if isinstance(part, str) else f"{part.label}:\n<data {token}>\n{part.text}\n</data {token}>"
        for part in parts
    )
