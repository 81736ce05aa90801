"""What a program and all it has started hold in memory, as the kernel counts it.

RLIMIT_AS bounds one process; eight of them may hold eight times as much.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

_RESIDENT = re.compile(rb"^Rss(?:Anon|Shmem):\s+(\d+) kB", re.MULTILINE)
_SHARE = re.compile(rb"^Pss_(?:Anon|Shmem):\s+(\d+) kB", re.MULTILINE)


def holds_more_than(root: int, limit: int) -> bool:
    """Whether the process `root` and its descendants hold more than `limit` bytes that no file backs.

    Pages shared after a fork count once. A process that ends meanwhile counts as 0.
    """
    processes = list(family(root))
    if sum(_bytes(pid, "status", _RESIDENT) or 0 for pid in processes) <= limit:
        return False
    shares = 0
    for pid in processes:  # exact, and too slow for a question that is mostly answered above
        share = _bytes(pid, "smaps_rollup", _SHARE)
        shares += (_bytes(pid, "status", _RESIDENT) or 0) if share is None else share
    return shares > limit


def family(root: int) -> Iterator[int]:
    """`root` and its living descendants. In a pid namespace those of its first process are all."""
    pending = [root]
    while pending:
        pid = pending.pop()
        yield pid
        try:
            threads = os.listdir(f"/proc/{pid}/task")
        except OSError:
            continue
        for thread in threads:
            pending += map(int, _read(f"/proc/{pid}/task/{thread}/children").split())


def _bytes(pid: int, file: str, kilobytes: re.Pattern[bytes]) -> int | None:
    text = _read(f"/proc/{pid}/{file}")
    return sum(int(number) for number in kilobytes.findall(text)) << 10 if text else None


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:  # it ended, or its maps are another user's
        return b""
