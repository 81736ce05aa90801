"""Every call of a coach as JSON lines, on disk before it leaves and before its reply is used: what a process that was
killed has spent is known, and no reply is paid twice."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from lightning_mappa.coaches.provider import CoachReply, Usage
from lightning_mappa.errors import CoachError, DataError

_NEEDED_BYTES = 4 << 20
"""Room for the replies of all calls in flight."""

ReplyKey = tuple[str, int]
"""(content hash, seed): each reply to the same content has a seed of its own."""


class CallOutcome(StrEnum):
    SENT = "sent"
    """Leaves now; its dollars are the most that it can cost. One that no `PAID` or `FAILED` of the same attempt follows
    was in flight when its process was killed."""
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
    seed: int | None
    """Tells the replies to the same content apart. None of a record in the former format, which says what was spent,
    and whose reply is not used again."""
    attempt: int | None
    """What left, numbered over the whole log; None where nothing left."""
    at: float | None
    """Unix seconds; None in the former format."""
    outcome: CallOutcome
    model: str
    usd: str
    """Decimal number of dollars."""
    latency_s: float | None
    """None of a call that only just leaves, and where nothing was asked."""
    reply: CoachReply | None
    """None of a call that was sent or failed."""

    @property
    def key(self) -> ReplyKey | None:
        """Of its reply; None where there is none to be used again."""
        return None if self.seed is None or self.reply is None else (self.prompt_hash, self.seed)


class CallLog:
    """The records of one run, in the order in which they were written.

    One process writes it at a time. A last line that a crash has torn is dropped; one that is JSON stays, whatever it
    says. Records of the former format, with `number` in place of `seed`, `attempt` and `at`, count as money spent.

    Raises:
        DataError: a line before the last is damaged, or one is no record of a call.
        CoachError: the file cannot be read or made.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._fault: str | None = None
        self._waiting: deque[CallRecord] = deque()
        """To be written next, all with one sync."""
        self.records: list[CallRecord] = []
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            self._end = self._read()
            os.ftruncate(self._file, self._end)
            _sync_folder(path.parent)
        except OSError as error:
            raise CoachError(f"cannot open {path}: {error.strerror or error}") from error
        except DataError:
            os.close(self._file)
            raise
        self._replies = _replies_of(self.records)

    def reply(self, key: ReplyKey) -> CoachReply | None:
        return self._replies.get(key)

    def lost(self) -> list[CallRecord]:
        """What was sent and has no answer: of a log that was just opened, calls of processes that were killed."""
        ended = {record.attempt for record in self.records if record.outcome is not CallOutcome.SENT}
        return [record for record in self.records if record.outcome is CallOutcome.SENT and record.attempt not in ended]

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
        self._waiting.append(record)
        await asyncio.shield(asyncio.to_thread(self._write_waiting))

    def close(self) -> None:
        os.close(self._file)

    def _write_waiting(self) -> None:
        """What waits, unless another thread has written it: syncs are slow, and many calls leave and end together."""
        with self._lock:
            if self._fault is not None:
                raise CoachError(self._fault)
            batch = [self._waiting.popleft() for _ in range(len(self._waiting))]
            if not batch:
                return
            lines = b"".join(json.dumps(asdict(record)).encode() + b"\n" for record in batch)
            try:
                written = 0
                while written < len(lines):
                    written += os.write(self._file, lines[written:])
                os.fsync(self._file)
                self._end += len(lines)
            except OSError as error:
                os.ftruncate(self._file, self._end)
                self._fault = f"the coach stops: cannot write {self._path} ({error.strerror or error})"
                raise CoachError(self._fault) from error
            self.records += batch
            self._replies |= _replies_of(batch)

    def _read(self) -> int:
        """Fills `records` and returns how many bytes of the file are whole lines."""
        text = self._path.read_bytes()
        if _is_json(text[text.rfind(b"\n") + 1 :]):  # All of it but its end is there.
            os.write(self._file, b"\n")
            text += b"\n"
        end = text.rfind(b"\n") + 1
        lines = text[:end].split(b"\n")[:-1]
        for number, line in enumerate(lines, start=1):
            if not _is_json(line):
                if number == len(lines):  # Its end reached the disk before its beginning.
                    return end - len(line) - 1
                raise DataError(f"{self._path}: line {number} is damaged")
            try:
                self.records.append(_record(json.loads(line)))
            except (ValueError, KeyError, TypeError) as error:
                raise DataError(
                    f"{self._path}: line {number} is damaged, or of another version of lightning-mappa; "
                    "the file is left as it is"
                ) from error
        return end


def reply_of(fields: Mapping[str, Any]) -> CoachReply:
    """From `asdict`; raises KeyError or TypeError for anything else."""
    return CoachReply(**{**fields, "usage": Usage(**fields["usage"])})


def _record(fields: Mapping[str, Any]) -> CallRecord:
    """Raises ValueError, KeyError or TypeError for what is none."""
    reply = None if fields["reply"] is None else reply_of(fields["reply"])
    told = {**fields, "outcome": CallOutcome(fields["outcome"]), "reply": reply}
    if told.keys() & {"number", "seed"} == {"number"}:
        del told["number"]
        told |= {"seed": None, "attempt": None, "at": None}
    return CallRecord(**told)


def _replies_of(records: Iterable[CallRecord]) -> dict[ReplyKey, CoachReply]:
    return {record.key: record.reply for record in records if record.key is not None and record.reply is not None}


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
