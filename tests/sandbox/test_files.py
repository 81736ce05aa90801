"""Programs that write where they should not, or leave a workspace that is hard to clear."""

from __future__ import annotations

import os
from pathlib import Path

from lightning_mappa.types import ToolStatus


def test_25_nothing_but_the_workspace_is_writable(run, harness):
    result = run(
        f"""
        import os, sys, tempfile
        folders = ["/", "/usr", "/usr/lib", "/etc", "/dev", "/proc", "/proc/sys/kernel", "/home", "/root", "/var/tmp"]
        folders += ["/run", os.path.dirname(os.__file__), os.path.dirname(os.path.realpath(sys.executable))]
        folders += [{str(harness.outside)!r}]
        folders += [path for path in sys.path if os.path.isdir(path)]
        for folder in folders:
            for attempt in (
                lambda: open(os.path.join(folder, "mappa-hostile"), "w"),
                lambda: os.mkdir(os.path.join(folder, "mappa-hostile")),
                lambda: os.symlink("/", os.path.join(folder, "mappa-hostile")),
            ):
                try:
                    attempt()
                except OSError:
                    continue
                print(folder)
        for path in (sys.executable, os.__file__, __file__):
            for attempt in (
                lambda: open(path, "r+"),
                lambda: os.chmod(path, 0o777),
                lambda: os.utime(path, (0, 0)),
                lambda: os.unlink(path),
            ):
                try:
                    attempt()
                except OSError:
                    continue
                print(path)
        for folder in (os.getcwd(), tempfile.gettempdir()):
            open(os.path.join(folder, "allowed"), "w").close()
        """
    )
    assert (result.status, result.stdout) == (ToolStatus.OK, ""), result


def test_30_no_rights_to_be_had(run):
    result = run(
        """
        import ctypes, os
        libc = ctypes.CDLL(None, use_errno=True)
        open("tool", "w").write("x")
        try:
            os.chmod("tool", 0o6777)
        except OSError:
            pass
        attempts = {
            "mknod": lambda: libc.mknod(b"device", 0o20666, 0x103),
            "mount": lambda: libc.mount(b"none", b".", b"tmpfs", 0, None),
            "chroot": lambda: libc.chroot(b"."),
            "setuid": lambda: libc.setuid(0),
            "setgroups": lambda: libc.setgroups(1, ctypes.byref(ctypes.c_int(0))),
            "user namespace": lambda: libc.unshare(0x10000000),
            "net namespace": lambda: libc.unshare(0x40000000),
            "mount namespace": lambda: libc.unshare(0x00020000),
            "clone": lambda: libc.syscall(56, 0x10000000 | 17, 0, 0, 0, 0),
            "clone3": lambda: libc.syscall(435, 0, 0),
            "bpf": lambda: libc.syscall(321, 0, 0, 0),
            "io_uring": lambda: libc.syscall(425, 1, 0),
            "keyctl": lambda: libc.syscall(250, 0, 0, 0, 0, 0),
            "userfaultfd": lambda: libc.syscall(323, 0),
            "perf": lambda: libc.syscall(298, 0, 0, -1, -1, 0),
        } if os.uname().machine == "x86_64" else {"unshare": lambda: libc.unshare(0x10000000)}
        for name, attempt in attempts.items():
            if attempt() >= 0:
                print(name)
        print(libc.prctl(39, 0, 0, 0, 0), os.getuid() != 0, os.geteuid() != 0)
        """
    )
    assert (result.status, result.stdout) == (ToolStatus.OK, "1 True True\n"), result


def test_44_tricky_names_and_deep_folders_are_cleared(run, harness):
    """The workspace is removed when the fixture closes it, which fails the test when it cannot be."""
    result = run(
        r"""
        import os
        for name in (b"\xff\xfe", b"a\nb", "\u202egpj.exe".encode(), b"n" * 255, b"-rf", b" ", b"*", b"\x1b[31m"):
            open(name, "w").close()
        os.mkdir("closed")
        open("closed/file", "w").close()
        try:
            os.chmod("closed", 0)
        except OSError:
            pass
        for _ in range(400):
            os.mkdir("d")
            os.chdir("d")
        """
    )
    assert result.status is ToolStatus.DISK_LIMIT, result


def test_45_the_hosts_tmp_is_not_the_programs(run, workspace):
    # Folders on the way to an interpreter that lies below /tmp are there, and empty but for it.
    program = """
        import os, sys
        open('/tmp/mappa-hostile-45', 'w').write('x' * (1 << 20))
        ours = [sys.executable, sys.prefix, *sys.path]
        print([name for name in os.listdir('/tmp') if not any(path.startswith(f'/tmp/{name}/') for path in ours)])
    """
    first, second = run(program), run("import os; print(os.path.exists('/tmp/mappa-hostile-45'))")
    assert first.stdout in ("['mappa-hostile-45']\n", "")
    assert second.stdout == "False\n"
    assert not Path("/tmp/mappa-hostile-45").exists()
    if os.geteuid() == 0:
        assert os.stat(workspace).st_mode & 0o077 == 0
