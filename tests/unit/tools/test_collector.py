"""Hostile trees, made for real: by hand, and by programs in the sandbox. Nothing of the host may come out."""

from __future__ import annotations

import contextlib
import os
import pickle  # noqa: TID251
import socket
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_mappa.tools import collector
from lightning_mappa.tools.collector import CollectLimits, Refusal, collect, list_files
from lightning_mappa.tools.workspace import remove_tree

SECRET = "label,1\n"


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    file = tmp_path / "labels.csv"
    file.write_text(SECRET)
    return file


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    folder = tmp_path / "tree"
    folder.mkdir()
    return folder


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def refused(listing: collector.Listing) -> dict[str, Refusal]:
    return {entry.path: entry.reason for entry in listing.refused}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# -- what is taken --------------------------------------------------------------------------------------------


def test_files_are_listed_in_order_with_size_and_time(tree: Path):
    (tree / "models").mkdir()
    (tree / "models" / "a.pkl").write_bytes(b"x" * 10)
    (tree / "submission.csv").write_text("id,y\n")
    os.utime(tree / "submission.csv", ns=(5, 7))
    listing = list_files(tree)
    assert [(file.path, file.size) for file in listing.files] == [("models/a.pkl", 10), ("submission.csv", 5)]
    assert listing.files[1].mtime_ns == 7
    assert listing.refused == ()
    assert listing.complete


def test_only_what_matches_is_copied_by_content(tree: Path, out: Path):
    (tree / "a" / "b").mkdir(parents=True)
    for name in ("one.csv", "a/two.csv", "a/b/three.txt"):
        (tree / name).write_text(name)
    listing = collect(tree, ["*.csv"], out)
    assert contents(out) == {"one.csv": b"one.csv", "a/two.csv": b"a/two.csv"}
    assert [file.path for file in listing.files] == ["a/two.csv", "one.csv"]
    assert (out / "one.csv").stat().st_ino != (tree / "one.csv").stat().st_ino


def test_setuid_and_every_other_bit_stays_behind(tree: Path, out: Path):
    (tree / "tool").write_text("#!/bin/sh\n")
    (tree / "tool").chmod(0o6777)
    assert stat.S_IMODE((tree / "tool").stat().st_mode) == 0o6777
    collect(tree, ["tool"], out)
    assert stat.S_IMODE((out / "tool").stat().st_mode) == 0o600


def test_a_copy_that_is_there_is_not_written_over(tree: Path, out: Path):
    (tree / "a.csv").write_text("new")
    out.mkdir()
    (out / "a.csv").write_text("old")
    with pytest.raises(FileExistsError):
        collect(tree, ["*"], out)
    assert (out / "a.csv").read_text() == "old"


def test_pickles_are_copied_and_never_loaded(tree: Path, out: Path, tmp_path: Path):
    """Under any name: the bytes come over as they are, and what loading them would do is not done."""
    canary = tmp_path / "canary"

    class Payload:
        def __reduce__(self) -> tuple[object, ...]:
            return Path.touch, (canary,)

    data = pickle.dumps(Payload())
    names = {"model.pkl", "x.csv", "x.npy", "x.joblib", "x.pt", "x.parquet", "x.feather", "sitecustomize.py"}
    for name in names:
        (tree / name).write_bytes(data)
    list_files(tree)
    collect(tree, ["*"], out)
    assert contents(out) == dict.fromkeys(names, data)
    assert not canary.exists()


# -- what is refused ------------------------------------------------------------------------------------------


def test_links_out_of_the_workspace_are_refused(tree: Path, out: Path, secret: Path):
    (tree / "submission.csv").symlink_to(secret)
    (tree / "relative.csv").symlink_to("../labels.csv")
    (tree / "folder").symlink_to(secret.parent)
    (tree / "loop").symlink_to("loop")
    (tree / "inside.csv").write_text("mine")
    (tree / "to_inside.csv").symlink_to("inside.csv")
    (tree / "proc.csv").symlink_to("/proc/self/environ")
    listing = collect(tree, ["*"], out)
    names = ("submission.csv", "relative.csv", "folder", "loop", "to_inside.csv", "proc.csv")
    assert refused(listing) == dict.fromkeys(names, Refusal.SYMLINK)
    assert contents(out) == {"inside.csv": b"mine"}
    assert list_files(tree).refused == listing.refused


def test_hard_links_are_refused_under_each_name(tree: Path, out: Path, secret: Path):
    os.link(secret, tree / "submission.csv")
    (tree / "a").write_text("twice")
    os.link(tree / "a", tree / "b")
    listing = collect(tree, ["*"], out)
    assert refused(listing) == dict.fromkeys(("submission.csv", "a", "b"), Refusal.HARD_LINK)
    assert contents(out) == {}


def test_pipes_sockets_and_devices_are_refused_without_blocking(tree: Path, out: Path):
    expected = {"submission.csv": Refusal.FIFO, "s": Refusal.SOCKET}
    os.mkfifo(tree / "submission.csv")
    with contextlib.suppress(PermissionError):  # for root alone
        os.mknod(tree / "zero", 0o666 | stat.S_IFCHR, os.makedev(1, 5))
        expected["zero"] = Refusal.DEVICE
    with socket.socket(socket.AF_UNIX) as listener:
        here = Path.cwd()
        os.chdir(tree)  # socket paths are short
        try:
            listener.bind("s")
        finally:
            os.chdir(here)
        begin = time.monotonic()
        assert refused(collect(tree, ["*"], out)) == expected
        assert refused(list_files(tree)) == expected
    assert time.monotonic() - begin < 1
    assert contents(out) == {}


def test_a_sparse_tebibyte_is_refused_at_once(tree: Path, out: Path):
    with (tree / "big.csv").open("wb") as file:
        file.truncate(1 << 40)
    begin = time.monotonic()
    assert refused(list_files(tree)) == {"big.csv": Refusal.TOO_LARGE}
    assert refused(collect(tree, ["*"], out)) == {"big.csv": Refusal.TOO_LARGE}
    assert time.monotonic() - begin < 1


def test_count_and_total_size_are_capped(tree: Path, out: Path):
    for name in "abcde":
        (tree / name).write_bytes(b"x" * 4)
    listing = collect(tree, ["*"], out, CollectLimits(total_bytes=10, file_bytes=4))
    assert [file.path for file in listing.files] == ["a", "b"]
    assert refused(listing) == dict.fromkeys("cde", Refusal.TOO_MUCH)
    assert refused(list_files(tree, CollectLimits(files=4))) == {"e": Refusal.TOO_MANY}
    assert refused(collect(tree, ["[de]"], out / "new", CollectLimits(files=1))) == {"e": Refusal.TOO_MANY}


def test_a_flood_of_entries_is_not_looked_at_to_its_end(tree: Path):
    for number in range(300):
        (tree / f"f{number}").touch()
    listing = list_files(tree, CollectLimits(entries=100))
    assert len(listing.files) == 100
    assert not listing.complete
    assert list_files(tree, CollectLimits(entries=300)).complete


NAMES = {
    b"new\nline.csv": r"new\nline.csv",
    b"\xff\xfe.csv": r"\udcff\udcfe.csv",
    b"esc\x1b[2J": r"esc\x1b[2J",
    "subm\u0456ssion.csv".encode(): r"subm\u0456ssion.csv",  # a Cyrillic letter
    "\u202evsc.csv".encode(): r"\u202evsc.csv",  # turns the text around
    b"-rf": "-rf",
    b"a" * 255: "a" * 197 + "...",
}


def test_tricky_names_are_refused_and_shown_harmlessly(tree: Path, out: Path):
    for name in NAMES:
        with open(os.fsencode(tree) + b"/" + name, "w") as file:
            file.write("x")
    expected = dict.fromkeys(NAMES.values(), Refusal.BAD_NAME)
    assert refused(list_files(tree)) == expected
    assert refused(collect(tree, ["*"], out)) == expected
    assert contents(out) == {}


@given(st.binary(min_size=1, max_size=250))
def test_any_path_is_shown_in_one_printable_line(name: bytes):
    shown = collector._escaped(os.fsdecode(name))
    assert shown.isprintable()
    assert shown.isascii()


def test_deep_folders_are_refused_and_removed(tmp_path: Path, out: Path):
    tree = tmp_path / "deep"
    tree.mkdir()
    folder = os.open(tree, os.O_RDONLY)
    for _ in range(400):
        os.mkdir("d" * 20, dir_fd=folder)
        inner = os.open("d" * 20, os.O_RDONLY, dir_fd=folder)
        os.close(folder)
        folder = inner
    os.close(folder)
    listing = collect(tree, ["*"], out)
    assert [entry.reason for entry in listing.refused] == [Refusal.TOO_DEEP]
    assert listing.refused[0].path.endswith("...")
    remove_tree(tree)
    assert not tree.exists()


def test_depth_counts_folders(tree: Path):
    (tree / "a" / "b").mkdir(parents=True)
    (tree / "a" / "b" / "file").touch()
    assert [file.path for file in list_files(tree, CollectLimits(depth=2)).files] == ["a/b/file"]
    assert refused(list_files(tree, CollectLimits(depth=1))) == {"a/b": Refusal.TOO_DEEP}


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_what_may_not_be_read_is_refused(tree: Path, out: Path):
    (tree / "file").touch(0o000)
    (tree / "folder").mkdir(0o000)
    assert refused(collect(tree, ["*"], out)) == dict.fromkeys(("file", "folder"), Refusal.UNREADABLE)
    (tree / "folder").chmod(0o700)


def test_a_workspace_that_is_a_link_is_an_error(tree: Path, tmp_path: Path):
    (tmp_path / "link").symlink_to(tree)
    with pytest.raises(OSError, match="link"):
        list_files(tmp_path / "link")


# -- late writers: there are none, and they would not get far ---------------------------------------------------


def replace_before_open(monkeypatch: pytest.MonkeyPatch, name: str, replace: Callable[[], object]) -> None:
    """Calls `replace` between the look at `name` and its opening."""
    real_open = os.open

    def late(path, flags, *rest, **options):
        if path == name and not flags & os.O_CREAT:
            replace()
        return real_open(path, flags, *rest, **options)

    monkeypatch.setattr(os, "open", late)


def test_a_file_replaced_by_a_link_is_refused(tree: Path, out: Path, secret: Path, monkeypatch):
    file = tree / "submission.csv"
    file.write_text("mine,1\n")

    def replace() -> None:
        file.unlink()
        file.symlink_to(secret)

    replace_before_open(monkeypatch, "submission.csv", replace)
    assert refused(collect(tree, ["*"], out)) == {"submission.csv": Refusal.CHANGED}
    assert contents(out) == {}


def test_a_file_replaced_by_a_link_to_a_secret_of_its_size_is_refused(tree: Path, out: Path, secret: Path, monkeypatch):
    file = tree / "submission.csv"
    file.write_text("x" * len(SECRET))

    def replace() -> None:
        file.unlink()
        os.link(secret, file)

    replace_before_open(monkeypatch, "submission.csv", replace)
    assert refused(collect(tree, ["*"], out)) == {"submission.csv": Refusal.CHANGED}
    assert contents(out) == {}


def test_a_folder_replaced_by_a_link_is_refused(tree: Path, out: Path, secret: Path, monkeypatch):
    (tree / "folder").mkdir()

    def replace() -> None:
        (tree / "folder").rmdir()
        (tree / "folder").symlink_to(secret.parent)

    replace_before_open(monkeypatch, "folder", replace)
    assert refused(collect(tree, ["*"], out)) == {"folder": Refusal.CHANGED}
    assert contents(out) == {}


def test_a_file_replaced_by_a_pipe_does_not_block(tree: Path, out: Path, monkeypatch):
    (tree / "submission.csv").touch()

    def replace() -> None:
        (tree / "submission.csv").unlink()
        os.mkfifo(tree / "submission.csv")

    replace_before_open(monkeypatch, "submission.csv", replace)
    assert refused(collect(tree, ["*"], out)) == {"submission.csv": Refusal.CHANGED}


def test_a_file_that_vanishes_is_refused(tree: Path, out: Path, monkeypatch):
    (tree / "submission.csv").touch()
    replace_before_open(monkeypatch, "submission.csv", (tree / "submission.csv").unlink)
    assert refused(collect(tree, ["*"], out)) == {"submission.csv": Refusal.VANISHED}


@pytest.mark.parametrize("size", [2, 9])
def test_a_file_that_changes_while_it_is_copied_leaves_nothing(tree: Path, out: Path, monkeypatch, size: int):
    (tree / "a.csv").write_bytes(b"x" * 5)
    real_copy = collector._copy

    def copy(source, *rest):
        os.truncate(tree / "a.csv", size)
        return real_copy(source, *rest)

    monkeypatch.setattr(collector, "_copy", copy)
    assert refused(collect(tree, ["*"], out)) == {"a.csv": Refusal.CHANGED}
    assert contents(out) == {}


def test_a_thread_that_swaps_file_and_link_gets_nothing_out(tree: Path, tmp_path: Path, secret: Path):
    file, done = tree / "submission.csv", threading.Event()
    file.write_text("mine,1\n")

    def swap() -> None:
        number = 0
        while not done.is_set():
            number += 1
            (tmp_path / "link").symlink_to(secret)
            (tmp_path / "file").write_text("mine,1\n")
            os.replace(tmp_path / "link", file)
            os.replace(tmp_path / "file", file)

    writer = threading.Thread(target=swap)
    writer.start()
    try:
        for number in range(200):
            collect(tree, ["*"], tmp_path / f"out{number}")
            assert SECRET.encode() not in contents(tmp_path / f"out{number}").values()
    finally:
        done.set()
        writer.join()


def test_descriptors_do_not_leak(tree: Path, tmp_path: Path):
    (tree / "a" / "b").mkdir(parents=True)
    (tree / "a" / "b" / "file").touch()
    (tree / "link").symlink_to("a")
    before = len(os.listdir("/proc/self/fd"))
    for number in range(5):
        collect(tree, ["*"], tmp_path / f"out{number}", CollectLimits(depth=number))
    assert len(os.listdir("/proc/self/fd")) == before


# -- the same through programs in the sandbox -------------------------------------------------------------------

TRAPS = """
    import os, socket
    os.symlink({secret!r}, "symlink.csv")
    open("one", "w").close(); os.link("one", "two")
    os.mkfifo("fifo.csv")
    socket.socket(socket.AF_UNIX).bind("socket.csv")
    with open("sparse.csv", "wb") as file:
        try: file.truncate(1 << 40)
        except OSError: file.truncate(7 << 20)
    for name in (b"new\\nline", b"\\xff", b"n" * 255):
        open(name, "w").close()
    open("setuid", "w").close(); os.chmod("setuid", 0o4755)
    for _ in range(40):
        os.mkdir("d"); os.chdir("d")
"""


def test_a_program_sets_every_trap_at_once(run, workspace: Path, out: Path, secret: Path):
    result = run(TRAPS.format(secret=str(secret)))
    assert result.ok, result
    listing = collect(workspace, ["*"], out, CollectLimits(file_bytes=1 << 20))
    assert refused(listing) == {
        "/".join("d" * 17): Refusal.TOO_DEEP,
        "fifo.csv": Refusal.FIFO,
        "n" * 197 + "...": Refusal.BAD_NAME,
        r"new\nline": Refusal.BAD_NAME,
        "one": Refusal.HARD_LINK,
        "socket.csv": Refusal.SOCKET,
        "sparse.csv": Refusal.TOO_LARGE,
        "symlink.csv": Refusal.SYMLINK,
        "two": Refusal.HARD_LINK,
        r"\udcff": Refusal.BAD_NAME,
    }
    assert contents(out) == {"setuid": b""}
    assert not (out / "setuid").stat().st_mode & stat.S_ISUID


def test_a_listing_is_not_what_a_program_prints(run, workspace: Path):
    result = run('print("files: submission.csv (1234 bytes)  score: 1.0")')
    assert "submission.csv" in result.stdout
    assert list_files(workspace) == collector.Listing(files=(), refused=(), complete=True)
