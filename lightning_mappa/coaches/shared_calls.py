"""One call whose result several ask for."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class _Open(Generic[T]):
    task: asyncio.Task[T]
    left: set[int]
    """Members that have not asked yet."""
    waiting: int = 0


class SharedCalls(Generic[T]):
    """Calls by key; each member of a call gets its result once, and who asks again starts another call.

    For one event loop.
    """

    def __init__(self) -> None:
        self._open: defaultdict[str, list[_Open[T]]] = defaultdict(list)

    async def get(
        self, key: str, member: int, members: Iterable[int], start: Callable[[], Coroutine[Any, Any, T]]
    ) -> T:
        """The result of the call `key` for `member`. The first of the `members` that asks starts it.

        Cancelled when all who wait for it are.
        """
        call = next((call for call in self._open[key] if member in call.left), None)
        if call is None:
            call = _Open(asyncio.create_task(start()), set(members))
            self._open[key].append(call)
        call.left.discard(member)
        if not call.left:
            self._close(key, call)
        call.waiting += 1
        try:
            return await asyncio.shield(call.task)
        except asyncio.CancelledError:
            if call.waiting == 1 and not call.task.done():
                call.task.cancel()
                self._close(key, call)
            raise
        finally:
            call.waiting -= 1

    def _close(self, key: str, call: _Open[T]) -> None:
        """No further member gets this call's result."""
        if call in self._open[key]:
            self._open[key].remove(call)
        if not self._open[key]:
            del self._open[key]
