"""Requests and replies of which a test names only what it is about."""

from __future__ import annotations

from typing import Any

from lightning_mappa.coaches.call_log import CallOutcome, CallRecord
from lightning_mappa.coaches.provider import CoachReply, CoachRequest, Usage

PRICES = {"input": 1.0, "cache_read": 0.1, "cache_write": 1.25, "output": 5.0}


def make_request(question: str = "Was this good?", **fields: Any) -> CoachRequest:
    defaults = {"call_id": question, "system": "Rate 0 to 10.", "shared": "The task.", "max_tokens": 100}
    return CoachRequest(question=question, **{**defaults, **fields})


def make_reply(text: str = '{"score": 7}', **fields: Any) -> CoachReply:
    """1000 tokens in and 100 out, unless given."""
    defaults = {
        "finish": "end",
        "usage": Usage(input_tokens=1000, output_tokens=100),
        "model": "m-2026",
        "request_id": "req_1",
        "structured": True,
    }
    return CoachReply(text=text, **{**defaults, **fields})


def make_record(seed: int = 0, **fields: Any) -> CallRecord:
    defaults = {
        "call_id": "c",
        "prompt_hash": "ab12",
        "attempt": seed,
        "at": 1e9,
        "outcome": CallOutcome.PAID,
        "model": "m",
        "usd": "0.0015",
        "latency_s": 2.0,
        "reply": make_reply(),
    }
    return CallRecord(seed=seed, **{**defaults, **fields})
