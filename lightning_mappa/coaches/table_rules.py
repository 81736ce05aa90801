"""A coach for teams that hand on files: it scores what the harness found in the folder, and needs no model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_mappa.file_trail import Folder, TrailEntry, file_trail, folder_after, missing
from lightning_mappa.tools.changes import FileEvent
from lightning_mappa.types import Action, ActionStatus, Episode, EpisodeStatus, ToolStatus, Verdict
from lightning_mappa.workflows.file_relay import Stage, read_stages

Judgement = tuple[float | None, str]

_CUT = "the episode was cut before the agent was done"


class TableRulesCoach:
    """Offline, deterministic, free. Whoever should have made a file is blamed when it is not there, and not the
    one that fell over it.

    | action | score |
    |---|---|
    | nothing generated (prompt too long), or the sandbox failed | missing |
    | files lack or the hand-in is refused, and the agent's own sandbox, or that of one whose files it was to find, \
failed; or the episode was cut before the agent was done | missing; no code stays 0 or 2 |
    | a file of another agent or of the task was there when the agent began, and is gone | 1 |
    | wrote what was handed in last, and it is refused; or came after that in the same part | 1 |
    | has a tool, wrote no code | 0; 2 where its inputs were missing |
    | program ended well, all files of its part are there | 9; 8 if it wrote none |
    | program failed, all files of its part are there | 5 |
    | files lack, and more programs of the agent follow that make them | 7 wrote some; 6 wrote none; 4 failed |
    | files lack, and the programs that follow do not make them | 5 wrote some; 4 wrote none; 3 failed |
    | files lack after its last program | 1 |
    | text after its last program | 8 all files are there; 1 they are not |
    | files lack because inputs were missing, in the last three rows and where a program failed | 4 |

    A file of no bytes is not there. What is in a file is not looked at: a fault inside of one shows where the next
    agent's program fails or the hand-in is refused. How good predictions are is left to `caps.CappedCoach`.
    A missing verdict says that there is nothing to judge.

    Args:
        stages: agent id → `needs` and `makes`, as the workflow has them.
        hand_in: the file that is graded.
    """

    name = "table_rules"
    needs_outcome = True

    def __init__(self, stages: Mapping[str, Mapping[str, Sequence[str]]], hand_in: str = "submission.csv") -> None:
        self._stages = {stage.agent_id: stage for stage in read_stages(stages, "coach.stages")}
        self._hand_in = hand_in

    async def score(self, episode: Episode, index: int) -> Verdict:
        score, reason = judge_step(episode, index, self._stages, self._hand_in)
        return Verdict(score=score, reason=reason, coach=self.name, unjudgeable=score is None)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """What one agent was there for, found, did and left."""

    stage: Stage
    found: Folder
    """When it began."""
    after: Folder
    wrote: tuple[TrailEntry, ...]
    """By the action."""
    left: Folder
    """When it was done."""
    is_last: bool
    """No program of the agent follows."""
    was_cut: bool
    """The episode ended before the agent did, through no doing of the agent's."""
    broken: str
    """Why a sandbox that failed may be the reason that files lack; empty where none failed."""
    broken_later: bool
    """The sandbox of a later program of the agent's failed."""

    @property
    def inputs_lack(self) -> list[str]:
        return missing(self.stage.needs, self.found)

    @property
    def lack(self) -> list[str]:
        """Files of its part that are not there after the action."""
        return missing(self.stage.makes, self.after)

    @property
    def lack_in_the_end(self) -> list[str]:
        return missing(self.stage.makes, self.left)


def judge_step(episode: Episode, index: int, stages: Mapping[str, Stage], hand_in: str) -> Judgement:
    """Score and one-line reason for `episode.actions[index]`, as the table of `TableRulesCoach` has it."""
    action = episode.actions[index]
    if action.status is ActionStatus.PROMPT_TOO_LONG:
        return None, "the prompt did not fit the context: nothing was generated"
    if _sandbox_failed(action):
        return None, "the sandbox failed, which says nothing of the program"
    if action.agent_id not in stages:
        return None, f"{action.agent_id} has no part in coach.stages"
    part = _part(episode, action, stages)
    taken = _taken_away(part)
    if taken:
        return 1.0, f"removed {', '.join(taken)}, which it was handed"
    if _is_refused_with(episode, action, hand_in):
        if part.broken and (part.inputs_lack or part.broken_later):
            return None, f"{hand_in} is refused ({episode.fault}), but {part.broken}"
        if part.inputs_lack:
            return 4.0, f"{hand_in} is refused ({episode.fault}), but {_list(part.inputs_lack)} missing"
        return 1.0, f"{hand_in} is refused, {episode.fault}: {episode.reason}"
    return _judge_code(action, part) if action.tool_results else _judge_text(action, part)


def _part(episode: Episode, action: Action, stages: Mapping[str, Stage]) -> _Part:
    actions, stage = episode.actions, stages[action.agent_id]
    own = [a.index for a in actions if a.agent_id == action.agent_id]
    last_program = max((i for i in own if actions[i].tool_results), default=own[-1])
    found = _folder(episode, own[0])
    return _Part(
        stage=stage,
        found=found,
        after=_folder(episode, action.index + 1),
        wrote=file_trail([action]),
        left=_folder(episode, own[-1] + 1),
        is_last=action.index >= last_program,
        was_cut=episode.status is not EpisodeStatus.OK and own[-1] == actions[-1].index,
        broken=_broken(episode, own, stages, missing(stage.needs, found)),
        broken_later=any(_sandbox_failed(actions[i]) for i in own if i > action.index),
    )


def _folder(episode: Episode, count: int) -> Folder:
    """After the first `count` actions."""
    return folder_after(episode.task.metadata.get("files", ()), file_trail(episode.actions[:count]))


def _broken(episode: Episode, own: Sequence[int], stages: Mapping[str, Stage], inputs_lack: Sequence[str]) -> str:
    """Whose sandbox failed: the agent's own, or, where its inputs lack, that of an earlier agent which then left less
    than it should have."""
    actions = episode.actions
    if any(_sandbox_failed(actions[index]) for index in own):
        return "the sandbox of a program of its part failed"
    earlier = actions[: own[0]] if inputs_lack else ()
    for action in earlier:
        stage = stages.get(action.agent_id)
        if stage is not None and _sandbox_failed(action) and missing(stage.makes, _folder(episode, own[0])):
            return f"the sandbox of a program of {action.agent_id} failed"
    return ""


def _sandbox_failed(action: Action) -> bool:
    return any(result.status is ToolStatus.SANDBOX_ERROR for result in action.tool_results)


def _taken_away(part: _Part) -> list[str]:
    """Files of others that the agent found, and that are gone or empty after this action."""
    there = [path for path in part.found if not missing([path], part.found)]
    own = part.stage.agent_id
    return [p for p in missing(there, part.after) if (entry := part.found[p]) is None or entry.agent_id != own]


def _is_refused_with(episode: Episode, action: Action, hand_in: str) -> bool:
    """Whether the action wrote the refused file last, or is a later one of the agent that did."""
    writes = [e for e in file_trail(episode.actions) if e.path == hand_in and e.event is not FileEvent.REMOVED]
    if not episode.fault or not writes or not writes[-1].size:
        return False
    return action.agent_id == writes[-1].agent_id and action.index >= writes[-1].step


def _judge_code(action: Action, part: _Part) -> Judgement:
    failed = next((result for result in reversed(action.tool_results) if not result.ok), None)
    if not part.lack:
        wrote = [entry.path for entry in part.wrote if entry.path in part.stage.makes]
        if failed is not None:
            return 5.0, f"a program ended with {failed.status}, but all its files are there"
        return (9.0, f"wrote {', '.join(wrote)}") if wrote else (8.0, "all its files are there")
    came_to_it = not part.lack_in_the_end
    if not came_to_it and (part.broken or part.was_cut):
        return None, f"{_list(part.lack)} missing, but {part.broken or _CUT}"
    if part.inputs_lack and (part.is_last or failed is not None):
        return 4.0, f"stopped by what it was handed: {_list(part.inputs_lack)} missing"
    if part.is_last:
        how = "its program ended well" if failed is None else f"its program ended with {failed.status}"
        return 1.0, f"{how}, and {_list(part.lack)} missing"
    if failed is not None:
        return (4.0 if came_to_it else 3.0), f"the program ended with {failed.status}"
    if any(entry.path in part.stage.makes for entry in part.wrote):
        return (7.0 if came_to_it else 5.0), f"wrote some of its files; {_list(part.lack)} still missing"
    return (6.0 if came_to_it else 4.0), "wrote none of its files yet"


def _judge_text(action: Action, part: _Part) -> Judgement:
    if action.status is ActionStatus.NO_CODE and part.lack:
        if part.inputs_lack:
            return 2.0, f"wrote no code to run; {_list(part.inputs_lack)} missing when it began"
        return 0.0, "wrote no code to run"
    if not part.lack:
        return 8.0, "all its files are there"
    if part.broken or part.was_cut:
        return None, f"{_list(part.lack)} missing, but {part.broken or _CUT}"
    if part.inputs_lack:
        return 4.0, f"stopped by what it was handed: {_list(part.inputs_lack)} missing"
    return 1.0, f"ended while {_list(part.lack)} missing"


def _list(paths: Sequence[str]) -> str:
    return f"{', '.join(paths)} {'is' if len(paths) == 1 else 'are'}"
