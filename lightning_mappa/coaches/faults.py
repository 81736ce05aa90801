"""What goes wrong again and again in a role, as the harness counts it."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from lightning_mappa.errors import ConfigError
from lightning_mappa.types import Action, ActionStatus, Episode, EpisodeStatus, ToolResult, ToolStatus

DECAY = 0.9
"""What a fault weighs one batch later."""
RECURRING = 2.0
"""A fault that weighs less is none that recurs."""
MAX_TOLD = 8
"""Lines of at most some 20 words."""

_MISSING_FILE = re.compile(r"FileNotFoundError|No such file or directory")
_EXCEPTION = re.compile(r"^(?:\w+\.)*([A-Z]\w{0,38}(?:Error|Exception|Interrupt))\b", re.MULTILINE)

_ENDED: Mapping[ToolStatus, str] = {
    ToolStatus.TIMEOUT: "a program ran out of time",
    ToolStatus.MEMORY: "a program ran out of memory",
    ToolStatus.OUTPUT_LIMIT: "a program printed too much",
    ToolStatus.DISK_LIMIT: "a program wrote too much",
    ToolStatus.PROCESS_LIMIT: "a program started too many processes",
    ToolStatus.SIGNAL: "a program was killed by a signal",
}


class FaultMemory:
    """Counts the faults of scored actions per role, and says which recur.

    Faults are what the harness has seen: how programs ended, cut texts, missing code, answers that cannot be read;
    never what an agent or the coach says. A batch is taken in when it has ended, so that all its cases are told the
    same, in whatever order they come.

    Args:
        told: at most so many faults of a role are told, the most frequent first; 0 counts nothing.
    """

    def __init__(self, told: int) -> None:
        if not 0 <= told <= MAX_TOLD:
            raise ConfigError(f"coach.recall_faults is {told}; allowed: 0 to {MAX_TOLD}")
        self._told = told
        self._faults: dict[str, dict[str, float]] = {}
        self._weight: dict[str, float] = {}
        self._batch: dict[tuple[str, int], tuple[str, tuple[str, ...]]] = {}

    def see(self, episode: Episode, index: int) -> None:
        """An action that is scored; one that is scored again in the same batch counts once."""
        if self._told:
            action = episode.actions[index]
            self._batch[episode.id, index] = action.role, tuple(faults_of(episode, index))

    def end_of_batch(self) -> None:
        counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
        actions: Counter[str] = Counter()
        for role, faults in self._batch.values():
            actions[role] += 1
            counts[role].update(faults)
        self._batch.clear()
        for role in self._weight.keys() | actions.keys():
            known = self._faults.get(role, {})
            self._weight[role] = DECAY * self._weight.get(role, 0.0) + actions[role]
            self._faults[role] = {
                fault: DECAY * known.get(fault, 0.0) + counts[role][fault]
                for fault in sorted(known.keys() | counts[role].keys())
                if DECAY * known.get(fault, 0.0) + counts[role][fault] > 0.01
            }

    def told(self, role: str) -> str:
        """A line per fault that recurs, with the share of the role's actions that have it; empty for none."""
        recurring = [(count, fault) for fault, count in self._faults.get(role, {}).items() if count >= RECURRING]
        worst = sorted(recurring, key=lambda entry: (-entry[0], entry[1]))[: self._told]
        return "\n".join(f"{role}, {count / self._weight[role]:.0%} of its steps: {fault}" for count, fault in worst)

    def state_dict(self) -> dict[str, Any]:
        """Of the batches that have ended."""
        return {"faults": self._faults, "weight": self._weight} if self._told else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._batch.clear()
        self._faults = {role: dict(faults) for role, faults in state.get("faults", {}).items()}
        self._weight = dict(state.get("weight", {}))


def faults_of(episode: Episode, index: int) -> Iterator[str]:
    """What the harness has against one action, each fault once."""
    action = episode.actions[index]
    yield from dict.fromkeys(
        fault for result in action.tool_results if not result.ok for fault in [_of_program(result)] if fault
    )
    if action.status is ActionStatus.PROMPT_TOO_LONG:
        yield "its prompt did not fit the context"
    if action.truncated:
        yield "its text was cut at the token limit"
    if action.status is ActionStatus.NO_CODE:
        yield "it has a tool and wrote no program"
    if _answers(episode, action) and episode.answer is None:
        yield "it gave no answer that can be read"


def _of_program(result: ToolResult) -> str | None:
    """None for a fault of ours."""
    if result.status is ToolStatus.SANDBOX_ERROR:
        return None
    if result.status is not ToolStatus.NONZERO:
        return _ENDED[result.status]
    if _MISSING_FILE.search(result.stderr):
        return "a program did not find a file"
    raised = _EXCEPTION.findall(result.stderr)
    return f"a program ended with {raised[-1]}" if raised else "a program ended with an error"


def _answers(episode: Episode, action: Action) -> bool:
    return episode.status is EpisodeStatus.OK and action.index == len(episode.actions) - 1
