"""The probes hold on the real sandbox, and each notices what is missing where there is none."""

from __future__ import annotations

import asyncio
import os

from lightning_mappa.tools.probes import CANARY, PROBES, run_probes
from lightning_mappa.tools.python import PythonTool


def test_every_probe_holds_in_the_sandbox(tool):
    assert len(PROBES) == 10
    assert asyncio.run(run_probes(tool)) == dict.fromkeys(PROBES, "")


def test_probes_see_that_there_is_no_sandbox():
    found = asyncio.run(run_probes(PythonTool(isolation="none")))
    open_ = {"network refused", "home hidden", "writing outside refused", "daemons dead"}
    assert {name for name, reason in found.items() if reason} >= open_
    assert found["network refused"] == "127.0.0.1 can be reached"
    assert found["workspace persists"] == ""
    assert CANARY not in os.environ
