"""One verdict, whatever its coach does."""

from __future__ import annotations

import asyncio

from lightning_mappa.coaches.base import Coach, ask
from lightning_mappa.errors import MappaError
from lightning_mappa.types import Episode, Verdict

DEADLINE_S = 3600.0


async def verdict_of(coach: Coach, episode: Episode, index: int, deadline_s: float = DEADLINE_S) -> Verdict:
    """Missing, with the reason, where the coach raises, cancels itself or takes longer than the deadline.

    `MappaError` passes, and so does being cancelled.
    """
    deadline = asyncio.timeout(deadline_s)
    try:
        async with deadline:
            return await ask(coach, episode, index)
    except MappaError:
        raise
    except asyncio.CancelledError:
        if is_cancelled():
            raise
        reason = "the coach cancelled itself"
    except Exception as error:
        raised = f"the coach raised {type(error).__name__}: {error}"
        reason = f"no verdict in {deadline_s:g} s (runtime.deadline_s)" if deadline.expired() else raised
    return Verdict(score=None, reason=reason, coach=coach.name)


def is_cancelled() -> bool:
    """Whether this task was told to stop, and not merely something that it waited for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
