"""What a program can see and reach from inside the sandbox: nothing of the machine but an interpreter."""

import contextlib
import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from lightning_mappa.tools.bubblewrap import own
from lightning_mappa.tools.workspace import Workspaces
from lightning_mappa.types import ToolStatus

SECRET = "canary-5f1c"


@pytest.fixture
def secret(monkeypatch):
    monkeypatch.setenv("ANTHROPIC_API_KEY", SECRET)


def test_no_environment_of_ours_is_readable(run, secret):
    result = run(
        """
        import os, glob
        for path in ["/proc/1/environ", "/proc/self/environ", *glob.glob("/proc/*/environ")]:
            try:
                print(path, open(path).read())
            except OSError as error:
                print(path, error)
        print(sorted(os.environ))
        """
    )
    assert result.ok
    assert SECRET not in result.stdout
    assert "ANTHROPIC" not in result.stdout


def test_no_process_of_the_machine_is_visible(run):
    result = run("import os; print(sorted(int(name) for name in os.listdir('/proc') if name.isdigit()), os.getpid())")
    assert result.stdout == "[1, 2] 2\n"


def test_only_three_descriptors_are_open(run):
    result = run(
        """
        import os
        print([number for number in range(3, 256) if os.path.exists(f"/proc/self/fd/{number}")])
        """
    )
    assert result.stdout == "[]\n"


@pytest.mark.parametrize("kind", ["home", "workspace", "folder", "package"])
def test_files_of_the_machine_are_not_there(run, tmp_path, kind):
    with Workspaces().open() as other:
        (other / "file").write_text(SECRET)
        (tmp_path / "file").write_text(SECRET)
        path = {
            "home": os.path.expanduser("~/.bashrc"),
            "workspace": other / "file",
            "folder": tmp_path / "file",
            "package": os.path.join(os.path.dirname(__file__), "../../../lightning_mappa/types.py"),
        }[kind]
        result = run(f"print(open({os.fspath(path)!r}).read())")
    assert result.status is ToolStatus.NONZERO
    assert "No such file" in result.stderr or "Permission denied" in result.stderr


def test_nothing_but_the_workspace_and_tmp_is_writable(run):
    result = run(
        """
        import os, sys
        folders = ["/", "/usr", "/usr/lib", "/etc", "/dev", "/program.py", "/proc", "/proc/sys/kernel"]
        folders += [os.path.dirname(os.__file__), os.path.dirname(sys.executable), *filter(os.path.exists, sys.path)]
        for folder in folders:
            try:
                open(os.path.join(folder, "new"), "w")
            except OSError:
                continue
            print(folder)
        for folder in ("/ws", "/tmp", "/dev/shm"):
            open(os.path.join(folder, "new"), "w")
        """
    )
    assert (result.status, result.stdout) == (ToolStatus.OK, "")


def test_no_network_is_reachable(run):
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(f"\0mappa-test-{os.getpid()}")
        unix.listen()
        result = run(
            f"""
            import socket
            print([socket.if_indextoname(1)])
            addresses = [
                (socket.AF_INET, ("127.0.0.1", {server.getsockname()[1]})),
                (socket.AF_INET, ("169.254.169.254", 80)),
                (socket.AF_INET, ("1.1.1.1", 53)),
                (socket.AF_UNIX, {unix.getsockname()!r}),
            ]
            for family, address in addresses:
                for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
                    with socket.socket(family, kind) as sock:
                        sock.settimeout(0.5)
                        try:
                            sock.connect(address)
                            sock.send(b"x")
                            if kind == socket.SOCK_DGRAM and family == socket.AF_INET:
                                sock.recv(1)
                        except OSError:
                            continue
                        print("reached", address)
            """
        )
    assert (result.status, result.stdout) == (ToolStatus.OK, "['lo']\n")


def test_it_has_no_rights(run):
    result = run(
        """
        import os
        status = dict(line.split(":", 1) for line in open("/proc/self/status"))
        print([int(status[key], 16) for key in ("CapEff", "CapPrm", "CapBnd", "CapAmb")], status["NoNewPrivs"].strip())
        for attempt in (lambda: os.setuid(0), lambda: os.mknod("node", 0o20666, 0x103), lambda: os.chroot("/ws")):
            try:
                attempt()
            except OSError:
                continue
            print("allowed")
        print(os.getuid() != 0, os.getgroups() in ([], [os.getgid()]))
        """
    )
    assert result.stdout == "[0, 0, 0, 0] 1\nTrue True\n"


def test_limits_cannot_be_raised(run):
    result = run(
        """
        import resource
        for name in ("CPU", "AS", "FSIZE", "NOFILE", "NPROC", "CORE"):
            limit = getattr(resource, f"RLIMIT_{name}")
            hard = resource.getrlimit(limit)[1]
            try:
                resource.setrlimit(limit, (hard + 1, hard + 1))
            except (ValueError, OSError):
                continue
            print(name)
        """
    )
    assert (result.status, result.stdout) == (ToolStatus.OK, "")


def test_it_cannot_reach_the_processes_that_started_it(run):
    before = threading.active_count()
    result = run(
        """
        import os, signal
        for target in (1, os.getppid(), -1):
            try:
                os.kill(target, signal.SIGKILL)
            except OSError as error:
                print(type(error).__name__)
        print("alive")
        """
    )
    assert result.stdout.endswith("alive\n")
    assert threading.active_count() >= before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives its workspaces away")
def test_programs_that_start_at_once_in_one_workspace_have_one_owner(tmp_path, monkeypatch):
    """Else the second takes the workspace from the first, which then cannot enter it."""
    together = threading.Barrier(2, timeout=0.5)

    def chown(*arguments, chown=os.chown):
        with contextlib.suppress(threading.BrokenBarrierError):
            together.wait()  # passed by two that have both seen a workspace without an owner
        chown(*arguments)

    monkeypatch.setattr(os, "chown", chown)
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(own, [tmp_path] * 2)
    assert first == second == os.stat(tmp_path).st_uid != 0
