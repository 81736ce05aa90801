"""What a program and all it has started hold, as the kernel counts it.

RLIMIT_AS bounds one process; eight of them may hold eight times as much. A file that is unlinked and still open is in
no folder, and takes up as much of the disk as before.
"""

from __future__ import annotations

import os
import re
import stat
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


def unlinked_bytes(root: int, device: int) -> int:
    """On the file system `device`, held by `root` and its descendants in files without a name, open or mapped."""
    held: dict[int, int] = {}
    for pid in family(root):
        try:
            descriptors = [entry.path for entry in os.scandir(f"/proc/{pid}/fd")]
        except OSError:
            continue
        for path in descriptors:
            try:
                file = os.stat(path)
            except OSError:
                continue
            if file.st_nlink == 0 and file.st_dev == device and stat.S_ISREG(file.st_mode):
                held[file.st_ino] = file.st_blocks * 512
        for line in _read(f"/proc/{pid}/maps").splitlines():
            if line.endswith(b" (deleted)"):
                span, _, _, where, inode, *_ = line.split()
                major, minor = (int(number, 16) for number in where.split(b":"))
                if os.makedev(major, minor) == device:
                    start, end = (int(number, 16) for number in span.split(b"-"))
                    held.setdefault(int(inode), end - start)
    return sum(held.values())


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
