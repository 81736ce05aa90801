"""Every call of a coach as a JSON line, on disk before its reply is used: a reply is never paid twice."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from lightning_mappa.coaches.provider import CoachReply, Usage
from lightning_mappa.errors import CoachError, DataError

_NEEDED_BYTES = 4 << 20
"""Room for the replies of all calls in flight."""

ReplyKey = tuple[str, int]
"""(content hash, n): the n-th reply to the same content, from 0."""


class CallOutcome(StrEnum):
    PAID = "paid"
    CACHED = "cached"
    """Answered by a run before this one."""
    FAILED = "failed"
    """Sent without a usable answer. Its dollars are the most that it can have cost, or none where it is known that the
    server does not bill it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRecord:
    """One call: what it cost, and its reply word for word. No prompt and no key."""

    call_id: str
    prompt_hash: str
    """Of all that decides the reply: model, prompts, schema, limit."""
    number: int
    """Replies to the same content before this one."""
    outcome: CallOutcome
    model: str
    usd: str
    """Decimal number of dollars."""
    latency_s: float | None
    """None where nothing was asked."""
    reply: CoachReply | None
    """None of a call that failed."""

    @property
    def key(self) -> ReplyKey:
        return self.prompt_hash, self.number


class CallLog:
    """The records of one run, in the order in which they were written.

    One process writes it at a time. A last line that a crash has torn is dropped.

    Raises:
        DataError: a line before the last is damaged.
        CoachError: the file cannot be read or made.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._fault: str | None = None
        self.records: list[CallRecord] = []
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            self._end = self._read()
            os.ftruncate(self._file, self._end)
            _sync_folder(path.parent)
        except OSError as error:
            raise CoachError(f"cannot open {path}: {error.strerror or error}") from error
        self._replies = {record.key: record.reply for record in self.records if record.reply is not None}

    def reply(self, key: ReplyKey) -> CoachReply | None:
        return self._replies.get(key)

    def check(self) -> None:
        """Raises `CoachError` when the disk is full or a write has failed: nothing more may be paid for then."""
        space = os.fstatvfs(self._file)
        free = space.f_bavail * space.f_frsize
        if self._fault is None and free < _NEEDED_BYTES:
            self._fault = f"the coach stops: {free} bytes are left for {self._path}, too few for calls in flight"
        if self._fault is not None:
            raise CoachError(self._fault)

    async def append(self, record: CallRecord) -> None:
        """Returns when the record is on the disk. Written to its end also where the caller is cancelled.

        Raises `CoachError` when the disk does not take it; the file keeps its whole lines.
        """
        await asyncio.shield(asyncio.to_thread(self._write, record))

    def close(self) -> None:
        os.close(self._file)

    def _write(self, record: CallRecord) -> None:
        line = json.dumps(asdict(record)).encode() + b"\n"
        with self._lock:
            if self._fault is not None:
                raise CoachError(self._fault)
            try:
                written = 0
                while written < len(line):
                    written += os.write(self._file, line[written:])
                os.fsync(self._file)
                self._end += len(line)
            except OSError as error:
                os.ftruncate(self._file, self._end)
                self._fault = f"the coach stops: cannot write {self._path} ({error.strerror or error})"
                raise CoachError(self._fault) from error
            self.records.append(record)
            if record.reply is not None:
                self._replies[record.key] = record.reply

    def _read(self) -> int:
        """Fills `records` and returns how many bytes of the file are whole lines."""
        text = self._path.read_bytes()
        end = text.rfind(b"\n") + 1
        lines = text[:end].splitlines()
        for number, line in enumerate(lines, start=1):
            try:
                self.records.append(_record(json.loads(line)))
            except (ValueError, KeyError, TypeError) as error:
                if number == len(lines):  # Its end reached the disk before its beginning.
                    return end - len(line) - 1
                raise DataError(f"{self._path}: line {number} is damaged") from error
        return end


def reply_of(fields: Mapping[str, Any]) -> CoachReply:
    """From `asdict`; raises KeyError or TypeError for anything else."""
    return CoachReply(**{**fields, "usage": Usage(**fields["usage"])})


def _record(fields: Mapping[str, Any]) -> CallRecord:
    reply = None if fields["reply"] is None else reply_of(fields["reply"])
    return CallRecord(**{**fields, "outcome": CallOutcome(fields["outcome"]), "reply": reply})


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
