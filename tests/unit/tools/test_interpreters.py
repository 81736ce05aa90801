"""The sandbox runs the interpreter that the run itself has, wherever it lies."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_mappa
from lightning_mappa.tools.python import PythonTool

PROGRAM = """
import asyncio, tempfile
from pathlib import Path
from lightning_mappa.tools.python import PythonTool
tool = PythonTool()
print(tool.check())
call, = tool.parse("```python\\nimport sys; print(sys.executable)\\n```")
print(asyncio.run(tool.run(call, Path(tempfile.mkdtemp()))).stdout)
tool.close()
"""


@pytest.mark.parametrize("tool", [()], ids=["cold"], indirect=True)
def test_a_virtual_environment_below_tmp(tmp_path: Path, tool: PythonTool):
    """The sandbox has a /tmp of its own, which must not hide the interpreter."""
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    path = [str(Path(lightning_mappa.__file__).parents[1]), *(p for p in sys.path if p.endswith("site-packages"))]
    done = subprocess.run(
        [str(venv / "bin" / "python"), "-c", PROGRAM],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [tool.check(), str(venv / "bin" / "python"), ""]
