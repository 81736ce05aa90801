"""Replies across runs: whole files under the hash of what was asked."""

from __future__ import annotations

import os

import pytest

from lightning_mappa.coaches.reply_cache import ReplyCache
from lightning_mappa.errors import CoachError, ConfigError
from tests.unit.coaches.calls import make_reply

KEY = ("ab12", 0)


def test_what_is_kept_is_found_by_another_run(tmp_path):
    ReplyCache(tmp_path / "cache").keep(KEY, make_reply())
    other = ReplyCache(tmp_path / "cache")
    assert other.reply(KEY) == make_reply()
    assert other.reply(("ab12", 1)) is None
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.json")] == ["cache/ab/ab12-0.json"]


@pytest.mark.parametrize("damage", ["", "{", "[]", "{}", '{"text": "x"}', '{"usage": {"dollars": 1}}', "3"])
def test_a_damaged_file_is_asked_for_anew_and_replaced(tmp_path, damage):
    cache = ReplyCache(tmp_path)
    cache.keep(KEY, make_reply())
    (tmp_path / "ab" / "ab12-0.json").write_text(damage)
    assert cache.reply(KEY) is None
    cache.keep(KEY, make_reply())
    assert cache.reply(KEY) == make_reply()


def test_a_folder_that_cannot_be_written_is_refused_at_the_start(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cache: cannot write to .*file/cache"):
        ReplyCache(tmp_path / "file" / "cache")


def test_a_write_that_fails_stops_the_coach_and_leaves_nothing_half(tmp_path):
    cache = ReplyCache(tmp_path)
    (tmp_path / "ab").touch()
    with pytest.raises(CoachError, match="cache: "):
        cache.keep(KEY, make_reply())
    os.unlink(tmp_path / "ab")
    assert cache.reply(KEY) is None
