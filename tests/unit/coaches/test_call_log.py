"""What is on disk after a crash, a full disk and a cancelled call."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import textwrap
import time
from dataclasses import asdict

import pytest

from lightning_mappa.coaches.call_log import CallLog, CallOutcome
from lightning_mappa.coaches.guard import BudgetGuard
from lightning_mappa.errors import CoachError, DataError
from tests.unit.coaches.calls import PRICES, make_record, make_reply


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / "coach_calls.jsonl"


def write(path, *records):
    log = CallLog(path)

    async def append():
        await asyncio.gather(*(log.append(record) for record in records))

    asyncio.run(append())
    log.close()


def test_what_was_written_is_read_back(path):
    odd = make_reply('{"score": 7, "why": "\u2028 \x85 \ud800 é"}', finish="refusal", detail="cyber", request_id=None)
    failed = make_record(2, outcome=CallOutcome.FAILED, reply=None)
    write(path, make_record(0), make_record(1, reply=odd), failed)
    log = CallLog(path)
    assert sorted(log.records, key=lambda record: record.seed) == [make_record(0), make_record(1, reply=odd), failed]
    assert log.reply(("ab12", 1)) == odd
    assert log.reply(("ab12", 2)) is None
    assert log.reply(("ab12", 3)) is None


def test_a_line_holds_the_accounts_of_the_call(path):
    write(path, make_record())
    line = json.loads(path.read_text())
    assert (line["model"], line["usd"], line["latency_s"], line["outcome"]) == ("m", "0.0015", 2.0, "paid")
    assert line["reply"]["usage"]["input_tokens"] == 1000
    assert (line["reply"]["request_id"], line["reply"]["model"]) == ("req_1", "m-2026")


def test_wherever_the_last_line_is_torn_the_lines_before_it_stand(path):
    write(path, make_record(0), make_record(1))
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for cut in range(first, len(whole) - 1, 13):
        path.write_bytes(whole[:cut])
        log = CallLog(path)
        assert len(log.records) == 1
        asyncio.run(log.append(make_record(5)))
        log.close()
        assert [record.seed for record in CallLog(path).records] == [log.records[0].seed, 5]


def test_a_last_line_whose_middle_never_reached_the_disk_is_dropped(path):
    write(path, make_record(0), make_record(1))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b"\0" * 50 + lines[1][50:])
    assert len(CallLog(path).records) == 1
    assert path.read_bytes() == lines[0]


def test_what_was_sent_and_has_no_end_is_lost(path):
    sent = [make_record(seed, outcome=CallOutcome.SENT, reply=None, latency_s=None) for seed in range(5)]
    failed = make_record(3, outcome=CallOutcome.FAILED, reply=None)
    cached = make_record(9, outcome=CallOutcome.CACHED, attempt=None)
    write(path, *sent, make_record(1), failed, cached)
    assert sorted(record.attempt for record in CallLog(path).lost()) == [0, 2, 4]


def test_a_call_whose_line_is_torn_has_not_left(path):
    sent = make_record(0, outcome=CallOutcome.SENT, reply=None, latency_s=None)
    write(path, sent)
    whole = path.read_bytes()
    for cut in (0, 1, len(whole) // 2, len(whole) - 2):
        path.write_bytes(whole[:cut])
        assert CallLog(path).lost() == []
    path.write_bytes(whole)
    assert CallLog(path).lost() == [sent]


def test_a_last_line_that_lacks_only_its_end_counts(path):
    """It may be paid for."""
    write(path, make_record(0), make_record(1))
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert len(CallLog(path).records) == 2
    assert path.read_bytes() == whole


def former(number: int = 0, **fields) -> dict[str, object]:
    """A record as it was before seeds."""
    told = json.loads(json.dumps(asdict(make_record(**fields))))
    return {"number": number} | {key: value for key, value in told.items() if key not in ("seed", "attempt", "at")}


def lines_of(*records: object) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


@pytest.mark.parametrize("end", [-1, None], ids=["without its end", "whole"])
@pytest.mark.parametrize("count", [1, 3])
def test_records_of_the_former_format_are_money_and_no_replies(path, count, end):
    failed = former(outcome=CallOutcome.FAILED, reply=None, usd="0.5")
    old = [former(number) for number in range(count - 1)] + [failed]
    path.parent.mkdir()
    path.write_bytes(lines_of(*old)[:end])
    write(path, make_record(7))
    log = CallLog(path)
    assert path.read_bytes().startswith(lines_of(*old))
    assert [record.usd for record in log.records] == ["0.0015"] * (count - 1) + ["0.5", "0.0015"]
    assert [log.reply(("ab12", number)) for number in (0, 1)] == [None, None]
    assert log.reply(("ab12", 7)) == make_reply()
    assert log.lost() == []

    guard = BudgetGuard(model="m", prices={"m": PRICES}, budget_usd=1)
    guard.bind(path.parent)
    figures = guard.summary()
    assert figures["calls"] == count + 1
    assert figures["usd"] == pytest.approx(0.5 + 0.0015 * count)
    assert (figures["usd_unsettled"], figures["calls_lost_in_flight"]) == (0.5, 0)


OTHERS = {
    "no fields": {},
    "a list": [],
    "more fields": former() | {"seed": 1, "attempt": 0, "at": 1.0},
    "fields to come": json.loads(json.dumps(asdict(make_record()))) | {"tier": "batch"},
    "another outcome": former(outcome="refunded"),
    "a number": 3,
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS.keys())
@pytest.mark.parametrize("end", [-1, None], ids=["without its end", "whole"])
@pytest.mark.parametrize("before", [0, 1])
def test_a_last_line_that_is_something_else_is_named_and_never_erased(path, before, end, other):
    path.parent.mkdir()
    text = lines_of(*[former()] * before, other)
    path.write_bytes(text[:end])
    with pytest.raises(DataError, match=rf"line {before + 1} is damaged, or of another version of lightning-mappa"):
        CallLog(path)
    assert path.read_bytes() == text


@pytest.mark.parametrize("damage", [b"{}\n", b"[]\n", b"not json\n", b"3\n"])
def test_damage_before_the_last_line_is_named(path, damage):
    write(path, make_record(0))
    path.write_bytes(damage + path.read_bytes())
    with pytest.raises(DataError, match=r"coach_calls\.jsonl: line 1 is damaged"):
        CallLog(path)


def test_many_calls_that_end_together_share_a_sync_and_all_are_on_the_disk(path, monkeypatch):
    syncs = []
    sync = os.fsync
    monkeypatch.setattr("os.fsync", lambda descriptor: (syncs.append(1), time.sleep(0.005), sync(descriptor)))
    write(path, *(make_record(seed) for seed in range(300)))
    monkeypatch.undo()
    assert {record.seed for record in CallLog(path).records} == set(range(300))
    assert len(syncs) < 150


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CoachError, match=r"cannot open .*file/coach_calls\.jsonl"):
        CallLog(tmp_path / "file" / "coach_calls.jsonl")


def test_a_record_whose_caller_is_cancelled_is_written_all_the_same(path):
    log = CallLog(path)

    async def scene():
        append = asyncio.create_task(log.append(make_record()))
        await asyncio.sleep(0)
        append.cancel()
        with pytest.raises(asyncio.CancelledError):
            await append

    asyncio.run(scene())
    assert log.records == CallLog(path).records == [make_record()]


def test_a_full_disk_stops_the_coach_and_leaves_whole_lines(path):
    """A limit on the size of files: the write that meets it is cut in its middle, as on a full disk."""
    program = """
        import asyncio, resource, signal, sys
        from pathlib import Path
        from lightning_mappa.coaches.call_log import CallLog
        from lightning_mappa.errors import CoachError
        from tests.unit.coaches.calls import make_record

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        log = CallLog(Path(sys.argv[1]))
        asyncio.run(log.append(make_record(0)))
        size = Path(sys.argv[1]).stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, resource.RLIM_INFINITY))
        for attempt in (lambda: asyncio.run(log.append(make_record(1))), log.check):
            try:
                attempt()
            except CoachError as error:
                print(error)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        try:
            asyncio.run(log.append(make_record(2)))
        except CoachError as error:
            print(error)
    """
    command = [sys.executable, "-c", textwrap.dedent(program), str(path)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(said) == 3
    assert len(set(said)) == 1
    assert said[0].startswith(f"the coach stops: cannot write {path} (File too large)")
    assert [record.seed for record in CallLog(path).records] == [0]


def test_nothing_is_paid_for_when_the_disk_has_no_room_for_the_reply(path, monkeypatch):
    log = CallLog(path)
    log.check()
    monkeypatch.setattr("lightning_mappa.coaches.call_log._NEEDED_BYTES", 1 << 62)
    with pytest.raises(CoachError, match=r"the coach stops: .* bytes are left for"):
        log.check()
