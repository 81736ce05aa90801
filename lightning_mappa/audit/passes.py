"""The passes of an audit: the same actions in order, in reverse, padded, and with words to the grader."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Sequence
from typing import Any

from lightning_mappa.audit.cases import AuditCase
from lightning_mappa.audit.scores import CaseScores, Score
from lightning_mappa.coaches.base import Coach, coach_snapshot, load_coach_state, shown_to, verdicts_of
from lightning_mappa.coaches.verdict import DEADLINE_S, verdict_of
from lightning_mappa.coaches.watch import MissingWatch
from lightning_mappa.types import Episode, Verdict

N_IN_FLIGHT = 64

Asked = tuple[Episode, int]


async def score_cases(
    coach: Coach,
    cases: Sequence[AuditCase],
    *,
    twice: bool = True,
    watch: MissingWatch | None = None,
    deadline_s: float = DEADLINE_S,
) -> list[CaseScores]:
    """Every verdict of the audit, one `CaseScores` per case, in their order; `twice` asks for every action again.

    A verdict that takes longer than the deadline is missing. `watch` sees them over all passes, and raises `CoachError`
    when too many are missing.

    A coach that remembers starts every pass as it was when it came, and ends as it was: no batch is ended, so that
    nothing that it learns in one pass is in the scores of another.
    """
    start = coach_snapshot(coach)
    asked = [(case.episode, action.index) for case in cases for action in case.episode.actions]
    guilty = [(case, case.guilty) for case in cases if case.guilty is not None]

    async def scores(questions: Sequence[Asked]) -> list[Score]:
        load_coach_state(coach, copy.deepcopy(start))
        return await _scores(coach, questions, watch, deadline_s)

    try:
        first = iter(await scores(asked))
        again = iter((await scores(asked[::-1]))[::-1] if twice else ())
        padded = iter(await scores([(case.padded(), index) for case, index in guilty]))
        injected = iter(await scores([(case.injected(), index) for case, index in guilty]))
    finally:
        load_coach_state(coach, copy.deepcopy(start))
    return [
        CaseScores(
            case=case,
            first=_next(first, case),
            again=_next(again, case) if twice else (),
            padded=next(padded) if case.faults else None,
            injected=next(injected) if case.faults else None,
        )
        for case in cases
    ]


def _next(scores: Any, case: AuditCase) -> tuple[Score, ...]:
    return tuple(next(scores) for _ in case.episode.actions)


async def _scores(coach: Coach, asked: Sequence[Asked], watch: MissingWatch | None, deadline_s: float) -> list[Score]:
    """One score per question, started in order, `N_IN_FLIGHT` at a time."""
    slots = asyncio.Semaphore(N_IN_FLIGHT)

    async def given(episode: Episode, index: int) -> Verdict:
        last_agent_id = episode.actions[-1].agent_id
        async with slots:
            verdict = await verdict_of(coach, shown_to(coach, episode, index, last_agent_id), index, deadline_s)
            if watch is not None:
                watch.see(episode.actions[index], verdict)
            return verdict

    return [verdict.score for verdict in await verdicts_of([given(episode, index) for episode, index in asked])]
