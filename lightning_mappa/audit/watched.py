"""Verdicts outside of a rollout: watched as in one, and with complete books where they end early."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from omegaconf import DictConfig

from lightning_mappa.coaches.base import Coach, accounts, halt_coach
from lightning_mappa.errors import CoachError

_OF_FIT = re.compile(r"\. It can go on with resume$|(?<=; mend it) and go on with resume$")
"""Advice that holds for `mappa fit` alone."""


def max_missing_rate(coach: DictConfig) -> float:
    """`coach.max_missing_rate`, 0 … 1; null allows for any."""
    rate = coach.get("max_missing_rate", 0.2)
    return 1.0 if rate is None else float(rate)


@asynccontextmanager
async def halted_on_failure(coach: Coach) -> AsyncIterator[None]:
    """When what is inside fails nothing more is asked, and calls in flight are booked first: they are paid for."""
    try:
        yield
    except BaseException as error:
        await halt_coach(coach, str(error) or type(error).__name__)
        raise


def not_ended(what: str, coach: Coach, error: CoachError) -> CoachError:
    """`error` with how far `what` has come, and with the advice of a command that goes on by itself."""
    books = accounts(coach)
    so_far = f", after {books.get('calls', 0)} calls" if books else ""
    return CoachError(
        f"{what} has not ended{so_far}: {_OF_FIT.sub('', str(error))}; what was paid for is kept, and the same command "
        "goes on with it"
    )
