"""What a coach may spend: set aside before a call, settled after it, so that calls in flight cannot pass the cap."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from decimal import Decimal

from lightning_mappa.errors import CoachError, ConfigError

_NOTHING = Decimal(0)
_GO_ON = "go on with a larger one: mappa fit resume=RUN +coach.guard.{}=…"


@dataclass(frozen=True, slots=True, eq=False)
class Reservation:
    """Set aside for one call in flight."""

    usd: Decimal


class Budget:
    """Dollars and calls of a whole run, resumed parts of it included.

    A call is counted when it is sent and stays counted when it fails: the server may have worked for it.

    Args:
        usd: cap in dollars; None is no cap.
        calls: cap in calls sent; None is no cap.
    """

    def __init__(self, *, usd: float | None = None, calls: int | None = None) -> None:
        if usd is not None and not 0 <= usd < float("inf"):
            raise ConfigError(f"budget_usd={usd}: must be 0 dollars or more, or null")
        if calls is not None and calls < 0:
            raise ConfigError(f"budget_calls={calls}: must be 0 or more, or null")
        self._cap_usd = None if usd is None else Decimal(str(usd))
        self._cap_calls = calls
        self.spent_usd = _NOTHING
        self.calls = 0
        self._open: set[Reservation] = set()
        self._waiting: list[asyncio.Future[None]] = []

    @property
    def committed_usd(self) -> Decimal:
        """Spent, and set aside for calls in flight."""
        return self.spent_usd + sum((reservation.usd for reservation in self._open), _NOTHING)

    async def reserve(self, usd: Decimal) -> Reservation:
        """Sets `usd` aside and counts one call.

        Waits while calls in flight may give back what this one lacks, and before it refuses: the run ends then,
        and replies under way are still wanted.

        Raises:
            CoachError: the call would pass a cap.
        """
        while (fault := self._fault(usd)) is not None:
            if not self._open:
                raise CoachError(fault)
            settled = asyncio.get_running_loop().create_future()
            self._waiting.append(settled)
            await settled
        reservation = Reservation(usd)
        self._open.add(reservation)
        self.calls += 1
        return reservation

    def settle(self, reservation: Reservation, usd: Decimal) -> None:
        """The call was answered and cost `usd`."""
        self.spent_usd += usd
        self.release(reservation)

    def release(self, reservation: Reservation) -> None:
        """The call failed."""
        self._open.remove(reservation)
        waiting, self._waiting = self._waiting, []
        for settled in waiting:
            if not settled.done():
                settled.set_result(None)

    def book(self, usd: Decimal) -> None:
        """Counts a call of an earlier process of this run."""
        self.spent_usd += usd
        self.calls += 1

    def _fault(self, usd: Decimal) -> str | None:
        """Why a call that may cost `usd` does not fit now."""
        if self._cap_calls is not None and self.calls >= self._cap_calls:
            return f"the coach has made the {self._cap_calls} calls of budget_calls; {_GO_ON.format('budget_calls')}"
        if self._cap_usd is not None and self.committed_usd + usd > self._cap_usd:
            return (
                f"the coach has spent {self.spent_usd:.4f} of the {self._cap_usd} dollars of budget_usd, and the next "
                f"call may cost {usd:.4f}; {_GO_ON.format('budget_usd')}"
            )
        return None


def forecast(so_far: float, steps_done: int, steps: int) -> float:
    """What the whole run will come to if every step costs what those done have cost; `steps_done` is at least 1."""
    return so_far * max(1.0, steps / steps_done)
