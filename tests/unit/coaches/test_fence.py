"""The key of the fences: one per run, the same when it is resumed, and shared with the cache."""

from __future__ import annotations

import asyncio

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
