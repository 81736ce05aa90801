import asyncio
import os
import textwrap

import pytest

from lightning_mappa.errors import ConfigError
from lightning_mappa.tools.python import PythonTool
from lightning_mappa.tools.workspace import Workspaces
from lightning_mappa.types import ToolCall


@pytest.fixture(scope="session", params=[(), ("numpy",)], ids=["cold", "warm"])
def tool(request):
    """The real tool on the real sandbox, with small limits; programs start anew or from a warm interpreter."""
    tool = PythonTool(
        warm=request.param,
        wall_s=3,
        memory_mb=256,
        processes=16,
        output_bytes=100_000,
        output_chars=200,
        workspace_mb=8,
        tmp_mb=4,
    )
    try:
        tool.check()
    except ConfigError as error:
        if "CI" in os.environ:
            raise
        pytest.skip(f"no isolation on this machine: {error}")
    yield tool
    tool.close()


@pytest.fixture
def workspace():
    with Workspaces().open() as path:
        yield path


@pytest.fixture
def run(tool, workspace):
    """Runs a program to its end and returns the result."""

    def run(code, where=workspace):
        call = ToolCall(name="python", arguments={"code": textwrap.dedent(code)})
        return asyncio.run(tool.run(call, where))

    return run
