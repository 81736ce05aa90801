"""A filter of system calls, as classic BPF that the kernel (and `bwrap --seccomp`) takes.

Namespaces and Landlock say what a program can name; the filter takes away kernel interfaces that no data program
needs and that escapes have been built on. Refused calls fail with an error, they do not kill: a library that tries
one falls back.
"""

from __future__ import annotations

import errno
import platform
import socket
import struct
from collections.abc import Collection

from lightning_mappa.errors import ConfigError

FAMILIES = frozenset({socket.AF_UNIX, socket.AF_INET, socket.AF_INET6})
"""Socket families of a program that has a network namespace of its own."""

# Name: number on x86_64, on aarch64; None where the machine has no such call.
_ESCAPES: dict[str, tuple[int | None, int | None]] = {
    # other processes
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    # namespaces and mounts
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "open_tree_attr": (467, 467),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    # large and seldom audited parts of the kernel
    "bpf": (321, 280),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "userfaultfd": (323, 282),
    "perf_event_open": (298, 241),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "fanotify_init": (300, 262),
    "vmsplice": (278, 75),
    "modify_ldt": (154, None),
    "ioperm": (173, None),
    "iopl": (172, None),
    # memory that belongs to no process, so that no limit counts it
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    # the machine itself
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "syslog": (103, 116),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
}

# What reaches the machine's other programs and files where no namespace hides them. The file calls take away
# permissions and times, which Landlock leaves open for files of the same user.
_SHARED: dict[str, tuple[int | None, int | None]] = {
    "socket": (41, 198),
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "lchown": (94, None),
    "fchown": (93, 55),
    "fchownat": (260, 54),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "setxattrat": (463, 463),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "removexattrat": (466, 466),
    "file_setattr": (469, 469),
    "inotify_init": (253, None),
    "inotify_init1": (294, 26),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "msgctl": (71, 187),
    "semget": (64, 190),
    "semop": (65, 193),
    "semtimedop": (220, 192),
    "semctl": (66, 191),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118),
    "sched_setattr": (314, 274),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "pidfd_open": (434, 434),
}

_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Column of the tables above, and the kernel's AUDIT_ARCH."""
_CLONE = (56, 220)
_CLONE3 = (435, 435)
_SOCKET = (41, 198)
_PRLIMIT64 = (302, 261)
_IOCTL = (16, 29)
_X32 = 0x40000000
_NEW_NAMESPACES = 0x7E020000  # CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
_TERMINAL_INPUT = (0x5412, 0x541C)  # TIOCSTI, TIOCLINUX: type into the terminal one was started from

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NR, _ARCH, _ARG0, _ARG1 = 0, 4, 16, 24
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000


def seccomp_filter(*, families: Collection[int] = FAMILIES, shared: bool = False, machine: str | None = None) -> bytes:
    """An array of the kernel's `sock_filter`, for the machine given or this one.

    Args:
        families: Of sockets that may be made.
        shared: No namespace separates the program from the machine's files and programs: no sockets at all, no
            System V or POSIX queues, no change of permissions, times or priorities.

    Raises:
        ConfigError: a machine whose system calls are not known.
    """
    machine = machine or platform.machine()
    if machine not in _MACHINES:
        raise ConfigError(f"tools.python.isolation: programs cannot be confined on {machine}, only on x86_64, aarch64.")
    column, arch = _MACHINES[machine]
    code = [_op(_LOAD, _ARCH), _op(_EQUAL, arch, 1, 0), _op(_RETURN, _KILL), _op(_LOAD, _NR)]
    code += [_op(_AT_LEAST, _X32, 0, 1), _refuse(errno.ENOSYS)]
    # Its flags lie in memory, which a filter cannot read; libraries fall back to clone.
    code += [_op(_EQUAL, _CLONE3[column], 0, 1), _refuse(errno.ENOSYS)]
    for call in (_ESCAPES | _SHARED if shared else _ESCAPES).values():
        if (number := call[column]) is not None:
            code += [_op(_EQUAL, number, 0, 1), _refuse(errno.EPERM)]
    code += _when(_CLONE[column], _ARG0, [_op(_ANY_BIT, _NEW_NAMESPACES, 0, 1), _refuse(errno.EPERM)])
    allowed = [_op(_EQUAL, family, len(families) - i, 0) for i, family in enumerate(sorted(families))]
    code += _when(_SOCKET[column], _ARG0, [*allowed, _refuse(errno.EAFNOSUPPORT)])
    terminal = [part for request in _TERMINAL_INPUT for part in (_op(_EQUAL, request, 0, 1), _refuse(errno.EPERM))]
    code += _when(_IOCTL[column], _ARG1, terminal)
    if shared:  # of other processes
        code += _when(_PRLIMIT64[column], _ARG0, [_op(_EQUAL, 0, 1, 0), _refuse(errno.EPERM)])
    return b"".join([*code, _op(_RETURN, _ALLOW)])


def _when(number: int, argument: int, checks: list[bytes]) -> list[bytes]:
    """`checks` on the lower half of an argument of one call; the number is loaded again behind them."""
    body = [_op(_LOAD, argument), *checks, _op(_LOAD, _NR)]
    return [_op(_EQUAL, number, 0, len(body)), *body]


def _op(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _refuse(error: int) -> bytes:
    return _op(_RETURN, _ERRNO | error)
