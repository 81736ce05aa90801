"""What a coach may spend: set aside before a call, settled after it, so that calls in flight cannot pass the cap."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass
from decimal import Decimal

from lightning_mappa.errors import CoachError, ConfigError

_NOTHING = Decimal(0)


@dataclass(frozen=True, slots=True, eq=False)
class Reservation:
    """Set aside for one call in flight."""

    usd: Decimal


class Budget:
    """Dollars and calls of a whole run, resumed parts of it included.

    A call is counted when it is sent and stays counted when it fails: the server may have worked for it. Several
    coaches may share one, each in its own thread and event loop.

    Args:
        usd: cap in dollars; None is no cap.
        calls: cap in calls sent; None is no cap.
        key: where the caps stand in the config.
    """

    def __init__(self, *, usd: float | None = None, calls: int | None = None, key: str = "coach.guard") -> None:
        if usd is not None and not 0 <= usd < float("inf"):
            raise ConfigError(f"budget_usd={usd}: must be 0 dollars or more, or null")
        if calls is not None and calls < 0:
            raise ConfigError(f"budget_calls={calls}: must be 0 or more, or null")
        self._cap_usd = None if usd is None else Decimal(str(usd))
        self._cap_calls = calls
        self.spent_usd = _NOTHING
        self.calls = 0
        self._key = key
        self._lock = threading.Lock()
        self._open: set[Reservation] = set()
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []

    @property
    def caps_usd(self) -> bool:
        return self._cap_usd is not None

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
        while True:
            with self._lock:
                fault = self._fault(usd)
                if fault is None:
                    reservation = Reservation(usd)
                    self._open.add(reservation)
                    self.calls += 1
                    return reservation
                if not self._open:
                    raise CoachError(fault)
                loop = asyncio.get_running_loop()
                settled = loop.create_future()
                self._waiting.append((loop, settled))
            await settled

    def settle(self, reservation: Reservation, usd: Decimal) -> None:
        """The call was answered and cost `usd`."""
        self._close(reservation, usd=usd)

    def release(self, reservation: Reservation) -> None:
        """The call failed, and cost nothing."""
        self._close(reservation)

    def take_back(self, reservation: Reservation) -> None:
        """The call was never sent."""
        self._close(reservation, calls=1)

    def book(self, usd: Decimal) -> None:
        """Counts a call of an earlier process of this run."""
        with self._lock:
            self.spent_usd += usd
            self.calls += 1

    def _close(self, reservation: Reservation, *, usd: Decimal = _NOTHING, calls: int = 0) -> None:
        with self._lock:
            self._open.remove(reservation)
            self.spent_usd += usd
            self.calls -= calls
            waiting, self._waiting = self._waiting, []
        for loop, settled in waiting:
            if not loop.is_closed():
                loop.call_soon_threadsafe(_wake, settled)

    def _fault(self, usd: Decimal) -> str | None:
        """Why a call that may cost `usd` does not fit now."""
        if self._cap_calls is not None and self.calls >= self._cap_calls:
            return f"the coach has made the {self._cap_calls} calls of budget_calls; {self._go_on('budget_calls')}"
        if self._cap_usd is not None and self.committed_usd + usd > self._cap_usd:
            return (
                f"the coach has spent {self.spent_usd:.4f} of the {self._cap_usd} dollars of budget_usd, and the next "
                f"call may cost {usd:.4f}; {self._go_on('budget_usd')}"
            )
        return None

    def _go_on(self, cap: str) -> str:
        return f"go on with a larger one: +{self._key}.{cap}=… (mappa fit: with resume=RUN)"


def _wake(settled: asyncio.Future[None]) -> None:
    if not settled.done():
        settled.set_result(None)


def forecast(so_far: float, steps_done: int, steps: int) -> float:
    """What the whole run will come to if every step costs what those done have cost; `steps_done` is at least 1."""
    return so_far * max(1.0, steps / steps_done)
