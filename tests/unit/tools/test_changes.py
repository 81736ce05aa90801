"""What changed between two looks at a workspace, and that the tool takes both looks."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from lightning_mappa.tools.changes import FileChange, FileEvent, changes_between
from lightning_mappa.tools.collector import list_files
from lightning_mappa.tools.python import PythonTool
from lightning_mappa.types import ToolCall


def test_made_written_removed_and_left_alone(tmp_path: Path):
    for name in ("kept", "written", "removed"):
        (tmp_path / name).write_text("1")
    before = list_files(tmp_path)
    (tmp_path / "written").write_text("22")
    (tmp_path / "removed").unlink()
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "made").write_text("")
    (tmp_path / "link").symlink_to("kept")
    assert changes_between(before, list_files(tmp_path)) == (
        FileChange(path="removed", event=FileEvent.REMOVED, size=0),
        FileChange(path="sub/made", event=FileEvent.CREATED, size=0),
        FileChange(path="written", event=FileEvent.CHANGED, size=2),
    )


def test_a_file_of_the_same_size_and_date_was_written_all_the_same(tmp_path: Path):
    file = tmp_path / "x"
    file.write_text("1")
    before = list_files(tmp_path)
    date = file.stat().st_mtime_ns
    file.write_text("2")
    os.utime(file, ns=(date, date))
    (change,) = changes_between(before, list_files(tmp_path))
    assert (change.event, change.size) == (FileEvent.CHANGED, 1)


def test_a_result_says_what_the_program_did_to_the_files(tmp_path: Path):
    tool = PythonTool(isolation="none")
    (tmp_path / "old.csv").write_text("a\n")

    def run(code: str):
        return asyncio.run(tool.run(ToolCall(name="python", arguments={"code": code}), tmp_path))

    try:
        first = run("open('new.txt', 'w').write('abc')")
        second = run("import os\nos.remove('old.csv')\nopen('new.txt', 'a').write('d')\nraise SystemExit(3)")
        third = run("print(open('new.txt').read())")
        large = run("open('model.pkl', 'wb').truncate(100 << 20)")
    finally:
        tool.close()
    assert first.files == (FileChange(path="new.txt", event=FileEvent.CREATED, size=3),)
    assert second.files == (
        FileChange(path="new.txt", event=FileEvent.CHANGED, size=4),
        FileChange(path="old.csv", event=FileEvent.REMOVED, size=0),
    )
    assert (second.exit_code, third.files, third.stdout) == (3, (), "abcd\n")
    assert large.files == (FileChange(path="model.pkl", event=FileEvent.CREATED, size=100 << 20),)
