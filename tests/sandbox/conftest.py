import os
import tempfile
import textwrap
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.sandbox.harness import contents, start

SEATS = [
    ("root", "namespaces, own uid"),
    ("nobody", "namespaces, user namespace"),
    ("nobody", "landlock"),
]
MORE_SEATS = [
    ("root", "landlock, own uid"),
    ("root", "namespaces, own uid, no /proc"),
    ("root", "namespaces, own uid, user namespace"),
    ("root", "namespaces, own uid, user namespace, no /proc"),
    ("nobody", "namespaces, user namespace, no /proc"),
    ("root", "namespaces, own uid, warm"),
    ("nobody", "namespaces, user namespace, warm"),
]


def _seat(seat, *marks):
    return pytest.param(seat, id=f"{seat[0]}-{seat[1].replace(', ', '+').replace(' ', '_')}", marks=marks)


@pytest.fixture(scope="session")
def make_outside():
    """Makes folders that others may enter: pytest's own are closed again by whoever starts pytest next."""
    with ExitStack() as stack:
        yield lambda: Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mappa-test-"))) / "outside"


@pytest.fixture(scope="session", params=[*map(_seat, SEATS), *(_seat(seat, pytest.mark.slow) for seat in MORE_SEATS)])
def harness(request, make_outside):
    """The harness as one user on one tier; skipped, with the reason, where the machine does not offer that."""
    identity, tier = request.param
    if identity == "root" and os.geteuid() != 0:
        pytest.skip("these tests do not run as root")
    harness, reason = start(identity, tier, make_outside())
    try:
        if reason:
            pytest.skip(f"{tier} as {identity}: {reason}")
        yield harness
    finally:
        harness.server.stdin.close()
        harness.server.wait(60)


@pytest.fixture
def workspace(harness):
    with harness.workspace() as path:
        yield path


@pytest.fixture
def run(harness, workspace):
    """Runs a program; afterwards nothing of it may be alive, and nothing outside changed."""
    harness_before, outside_before = harness.state(), contents(harness.outside)

    def run(program, where=workspace, **limits):
        return harness.run(textwrap.dedent(program), where, **limits)

    yield run
    harness_after = harness.state()
    assert harness_after["processes"] == []
    assert len(harness_after["descriptors"]) == len(harness_before["descriptors"])
    assert harness_after["groups"] == 0
    assert harness_after["mounts"] == harness_before["mounts"]
    assert harness_after["memory_mb"] < harness_before["memory_mb"] + 24
    assert contents(harness.outside) == outside_before
