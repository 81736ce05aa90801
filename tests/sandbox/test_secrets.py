"""Programs that look for keys, labels, other agents' work, and anything that was left open."""

from __future__ import annotations

import os
import sys

import pytest

from lightning_mappa.types import ToolStatus
from tests.sandbox.harness import CANARY

LOOK_AROUND = f"""
import glob, os
canary = {CANARY[:6]!r} + {CANARY[6:]!r}
if canary in str(dict(os.environ)):
    print("own environment")
for path in [*glob.glob("/proc/[0-9]*/environ"), *glob.glob("/proc/[0-9]*/cmdline"), "/proc/self/environ"]:
    try:
        data = open(path, "rb").read()
    except OSError:
        continue
    if canary.encode() in data or b"ANTHROPIC" in data or b"labels" in data:
        print(path, data)
for pid in glob.glob("/proc/[0-9]*"):
    if int(pid[6:]) > 20:
        print("another process:", pid)
for path in glob.glob("/proc/[0-9]*/fd/*"):
    try:
        target = os.readlink(path)
    except OSError:
        continue
    if not target.startswith(("/dev/null", "pipe:", "anon_inode", "/proc/")):
        print("open:", path, target)
"""


def test_21_no_environment_argument_or_process_of_ours(run):
    result = run(LOOK_AROUND)
    assert (result.status, result.stdout) == (ToolStatus.OK, ""), result


def test_22_41_no_credentials_labels_or_checkpoints(run, harness):
    paths = [str(path) for path in harness.outside.rglob("*") if path.is_file()]
    assert len(paths) == 7
    paths += [str(harness.outside), str(harness.outside / "run"), os.path.expanduser("~root/.bashrc"), "/etc/shadow"]
    result = run(
        f"""
        import os
        homes = [os.path.expanduser(name) for name in ("~/.config/anthropic", "~/.aws", "~/.cache/huggingface")]
        for path in {paths!r} + ["/root", "/home", *homes]:
            for look in (lambda: open(path).read(), lambda: os.listdir(path)):
                try:
                    print(path, look())
                except OSError:
                    continue
        """
    )
    told = result.stdout.replace("/root []\n", "").replace(f"/root {sorted(_on_the_way('/root'))}\n", "")
    assert (result.status, CANARY in result.stdout) == (ToolStatus.OK, False), result
    assert told == "", result


def _on_the_way(folder: str) -> set[str]:
    """What of an interpreter in root's home must be there."""
    prefixes = {sys.prefix, sys.base_prefix, os.path.realpath(sys.base_prefix)}
    return {path.split("/")[2] for path in prefixes if path.startswith(f"{folder}/")}


def test_23_only_three_descriptors_are_open(run):
    result = run(
        """
        import fcntl, os
        for number in range(3, 1024):
            try:
                fcntl.fcntl(number, fcntl.F_GETFD)
                print(number)
            except OSError:
                pass
            try:
                os.write(number, b"x")
                print("written", number)
            except OSError:
                pass
        """
    )
    assert (result.status, result.stdout) == (ToolStatus.OK, ""), result


def test_24_no_other_workspace(run, harness):
    with harness.workspace() as other:
        assert run("open('secret', 'w').write('theirs')", other).ok
        result = run(
            f"""
            import os
            other = {other!r}
            for attempt in (
                lambda: open(other + "/secret").read(),
                lambda: os.listdir(other),
                lambda: [name for name in os.listdir(os.path.dirname(other)) if name in other],
                lambda: open(other + "/new", "w"),
                lambda: os.unlink(other + "/secret"),
                lambda: os.rename(other, other + "x"),
                lambda: os.symlink(other, "link") or os.listdir("link"),
                lambda: os.link(other + "/secret", "mine"),
            ):
                try:
                    print(attempt())
                except OSError:
                    continue
            """
        )
        assert (result.status, result.stdout) == (ToolStatus.OK, ""), result
        assert run("print(open('secret').read())", other).stdout == "theirs\n"


@pytest.mark.parametrize("name", ["run/labels.csv", "run/metrics.json"])
def test_40_labels_and_metrics_are_not_written_over(run, harness, name):
    result = run(
        f"""
        import os
        path = {str(harness.outside / name)!r}
        for attempt in (
            lambda: open(path, "w"),
            lambda: open(path, "a"),
            lambda: os.truncate(path, 0),
            lambda: os.unlink(path),
            lambda: os.rename(path, path + "x"),
            lambda: os.replace(__file__, path),
            lambda: os.chmod(path, 0o777),
            lambda: os.utime(path, (0, 0)),
            lambda: os.setxattr(path, "user.mappa", b"x"),
        ):
            try:
                attempt()
            except OSError:
                continue
            print("done")
        """
    )
    assert (result.status, result.stdout) == (ToolStatus.OK, ""), result
