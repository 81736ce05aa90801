"""The key of the fences: one per run, the same when it is resumed, and shared with the cache."""

from __future__ import annotations

import asyncio
import errno
import secrets
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from lightning_mappa.coaches.fence import FILE, fence_key
from lightning_mappa.coaches.guard import BudgetGuard
from lightning_mappa.errors import CoachError
from tests.fake_messages_api import MODEL, message, verdict
from tests.unit.coaches.conftest import make_episode


def test_a_run_keeps_its_key_and_another_has_another(tmp_path):
    first = fence_key(tmp_path / "one")
    assert len(first) == 32
    assert fence_key(tmp_path / "one") == first
    assert fence_key(tmp_path / "two") != first


def test_runs_that_share_replies_share_the_key_and_a_runs_own_comes_first(tmp_path):
    one, two, cache = (tmp_path / name for name in ("one", "two", "cache"))
    assert fence_key(one, cache) == fence_key(two, cache) == fence_key(cache) == fence_key(one)
    own = fence_key(tmp_path / "three")
    assert fence_key(tmp_path / "three", cache) == own != fence_key(cache)


@pytest.mark.parametrize("links", [True, False])
def test_runs_that_start_together_on_a_fresh_cache_take_one_key(tmp_path, monkeypatch, links):
    """Every one has found none, and made its own, before any is written."""
    runs = 8
    together, made = threading.Barrier(runs), secrets.token_hex

    def token(size):
        if links:
            together.wait(10)
        return made(size)

    def no_link(source, target):
        raise OSError(errno.EPERM, "no hard links here")

    monkeypatch.setattr("secrets.token_hex", token)
    if not links:
        monkeypatch.setattr("os.link", no_link)
    cache, folders = tmp_path / "cache", [tmp_path / f"run{number}" for number in range(runs)]
    with ThreadPoolExecutor(runs if links else 1) as workers:
        keys = list(workers.map(lambda folder: fence_key(folder, cache), folders))
    assert len(set(keys)) == 1
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert sorted(files) == sorted(folder / FILE for folder in (cache, *folders))
    assert {path.read_text() for path in files} == {keys[0].hex()}
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}


@pytest.mark.parametrize("damage", ["", "ab", "x" * 64, "0" * 63, "0" * 64 + "\n"])
def test_a_damaged_key_is_named_and_not_replaced(tmp_path, damage):
    (tmp_path / FILE).write_text(damage)
    with pytest.raises(CoachError, match=rf"{FILE} holds no key"):
        fence_key(tmp_path)
    assert (tmp_path / FILE).read_text() == damage


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CoachError, match=rf"cannot keep the coach's {FILE}"):
        fence_key(tmp_path / "file" / "run")


@pytest.mark.parametrize("cached", [True, False])
def test_two_runs_of_one_config_ask_the_same_only_where_they_share_replies(serve, tmp_path, cached):
    asked = []
    for name in ("one", "two", "one"):
        guard = BudgetGuard(model=MODEL, cache=tmp_path / "cache" if cached else None)
        service = serve(lambda call: message(verdict(call, 7)), guard=guard)
        service.coach.bind(tmp_path / name)
        assert asyncio.run(service.coach.score(make_episode(), 0)).score == 7
        asked.append(len(service.api.calls))
    assert asked == ([1, 0, 0] if cached else [1, 1, 0])
