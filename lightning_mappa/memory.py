"""What a process has needed of this machine's memory."""

from __future__ import annotations

from pathlib import Path

KIB_PER_GIB = 2**20


def peak_rss_gib(pid: int | None = None) -> float | None:
    """The most that the process (None: this one) has held so far, as the kernel counts it.

    None where that cannot be read: the process is gone or on another machine, or this is no Linux.
    """
    try:
        lines = Path(f"/proc/{pid or 'self'}/status").read_text().splitlines()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return int(fields["VmHWM"].split()[0]) / KIB_PER_GIB if "VmHWM" in fields else None
