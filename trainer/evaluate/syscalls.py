"""The system calls refused to a sandboxed program: a BPF program for seccomp, as bwrap takes it.

Refused are calls that take memory or start work beyond the limits of one process, and calls that
reach into other processes or rarely used parts of the kernel. A refused call fails with EPERM. The
program is a table of numbers, too short to need a library on the hosts.
"""

from __future__ import annotations

import errno
import platform
import struct

from trainer.system.errors import InputError

_ABSENT = -1
# fmt: off
_REFUSED: dict[str, tuple[int, int]] = {
    # Further processes, each with a memory limit of its own.
    "fork": (57, _ABSENT), "vfork": (58, _ABSENT),
    # Memory that belongs to no process: shared memory, message queues, semaphores, watches, pages
    # that a pipe keeps alive, buffers of network connections. Pairs of sockets stay, for asyncio:
    # with buffers of the default size, and none that is kept alive on its way through another.
    "shmget": (29, 194), "memfd_create": (319, 279), "memfd_secret": (447, 447),
    "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180),
    "inotify_init": (253, _ABSENT), "inotify_init1": (294, 26), "fanotify_init": (300, 262),
    "vmsplice": (278, 75), "splice": (275, 76), "tee": (276, 77), "socket": (41, 198),
    "setsockopt": (54, 208), "sendmsg": (46, 211), "sendmmsg": (307, 269),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    "io_setup": (206, 0), "io_uring_setup": (425, 425),
    # Other processes.
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "pidfd_open": (434, 434), "pidfd_getfd": (438, 438), "kcmp": (312, 272),
    # Namespaces and mounts.
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39),
    "pivot_root": (155, 41), "open_tree": (428, 428), "move_mount": (429, 429),
    "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433),
    "mount_setattr": (442, 442), "open_by_handle_at": (304, 265),
    # Other calls that only attacks use.
    "bpf": (321, 280), "userfaultfd": (323, 282), "perf_event_open": (298, 241),
    "personality": (135, 92),
}
# fmt: on
"""Numbers on x86-64 and on 64-bit ARM."""
_CLONE, _CLONE3 = (56, 220), 435
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_CLONE_THREAD = 0x10000
_OTHER_ABI = 0x40000000  # x32, on x86-64

# Operations and actions of classic BPF and seccomp, <linux/bpf_common.h> and <linux/seccomp.h>.
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _FAIL = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data


def refused_calls() -> dict[str, int]:
    """Return the refused calls of this machine by name, without those that threads need."""
    column = list(_ARCHITECTURES).index(_get_machine())
    return {name: row[column] for name, row in _REFUSED.items() if row[column] != _ABSENT}


def seccomp_filter() -> bytes:
    """Return the program for this machine.

    Raises:
        InputError: there is none for its architecture.
    """
    machine = _get_machine()
    clone = _CLONE[list(_ARCHITECTURES).index(machine)]
    program = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, _ARCHITECTURES[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _OTHER_ABI),
        (_RETURN, 0, 0, _KILL),
        # Its flags are in memory, which a filter cannot read. The C library then uses clone.
        (_EQUAL, 0, 1, _CLONE3),
        (_RETURN, 0, 0, _FAIL | errno.ENOSYS),
        # A thread shares the memory and limits of its process; a new process would not.
        (_EQUAL, 0, 4, clone),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_ANY_BIT, 0, 1, _CLONE_THREAD),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _FAIL | errno.EPERM),
    ]
    for number in refused_calls().values():
        program += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _FAIL | errno.EPERM)]
    program.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def _get_machine() -> str:
    machine = platform.machine()
    if machine not in _ARCHITECTURES:
        raise InputError(
            f"a model's code runs only on x86_64 and aarch64, this machine is {machine}: leave "
            "out the task code"
        )
    return machine
