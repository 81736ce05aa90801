"""Which isolation is taken, and what Landlock lets a program read."""

import os
from pathlib import Path

import pytest

from lightning_mappa.errors import ConfigError
from lightning_mappa.tools import bubblewrap, ladder, landlock
from lightning_mappa.tools.interpreter import PACKAGE
from lightning_mappa.tools.sandbox import Limits


def test_namespaces_come_first(tool):
    assert tool.tier.startswith("namespaces")


def test_landlock_is_next_where_no_namespace_can_be_had(monkeypatch):
    monkeypatch.setattr(bubblewrap, "_binaries", lambda: ["/bin/false"])
    tiers = [sandbox.tier for sandbox in ladder._candidates("auto")]
    assert len(tiers) > 1
    assert tiers[-1].startswith("landlock")
    assert all(tier.startswith("namespaces") for tier in tiers[:-1])


def test_one_that_was_named_is_not_replaced(monkeypatch):
    monkeypatch.setattr(bubblewrap, "_binaries", lambda: ["/bin/false"])
    with pytest.raises(ConfigError, match=r"^tools\.python\.isolation=bubblewrap: .*namespaces") as error:
        ladder.find_sandbox("bubblewrap", Limits())
    assert "landlock" not in str(error.value)
    assert {sandbox.tier.split(",")[0] for sandbox in ladder._candidates("landlock")} == {"landlock"}


def test_nothing_of_the_package_is_readable_under_landlock():
    folder = str(PACKAGE.parents[1])
    readable, listed = landlock._without_package([folder, "/usr/lib", "/no/such/path"])
    assert not any(PACKAGE.is_relative_to(os.path.realpath(path)) for path in readable)
    assert not any(Path(os.path.realpath(path)).is_relative_to(PACKAGE) for path in readable)
    beside = {entry.path for entry in os.scandir(PACKAGE.parent) if entry.name != PACKAGE.name}
    assert {path for path in beside if os.path.exists(path)} <= set(readable)
    assert "/usr/lib" in readable
    assert listed == [folder]
