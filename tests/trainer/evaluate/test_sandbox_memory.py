"""Ways around a limit of address space: each gets a program more memory than it may have.

Outside the same limit holds for the same programs, and all of them get around it.
"""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from tests.trainer.evaluate.confinement import attempt, open_sandbox
from trainer.evaluate import syscalls
from trainer.evaluate.sandbox import Sandbox, Trial

MIB = 1024**2
LIMIT = 256 * MIB
WANTED = 320 * MIB


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    return open_sandbox(seconds=60, memory=LIMIT)


def succeeds_outside(program: str) -> bool:
    limited = f"import resource as r\nr.setrlimit(r.RLIMIT_AS, ({LIMIT}, {LIMIT}))\n" + program
    return subprocess.run([sys.executable, "-I", "-S", "-c", limited], check=False).returncode == 0


SHARED_MEMORY = f"""
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
libc.shmat.restype = ctypes.c_void_p
ids = []
try:
    for _ in range({WANTED // (32 * MIB)}):
        ids.append(libc.shmget(0, {32 * MIB}, 0o1600))
        assert ids[-1] >= 0, ctypes.get_errno()
        at = libc.shmat(ids[-1], None, 0)
        assert at != ctypes.c_void_p(-1).value
        ctypes.memset(at, 1, {32 * MIB})
        libc.shmdt(ctypes.c_void_p(at))
finally:
    for number in ids:
        libc.shmctl(number, 0, None)
"""
MEMORY_FILE = f"""
import os
file = os.memfd_create("x")
for _ in range({WANTED // MIB}):
    os.write(file, bytes({MIB}))
"""
FILES_IN_MEMORY = f"""
import os, tempfile
for folder in ("/tmp", "/dev/shm", "/run", "/var/tmp"):
    try:
        file = tempfile.TemporaryFile(dir=folder)
        for _ in range({WANTED // MIB}):
            file.write(bytes({MIB}))
        file.flush()
        break
    except OSError:
        continue
else:
    raise AssertionError("nowhere to write")
"""
EMPTY_FILES = """
import tempfile
with tempfile.TemporaryDirectory() as folder:
    for number in range(1000):
        open(f"{folder}/{number}", "w").close()
"""
SEVERAL_PROCESSES = f"""
import os
ready, told = os.pipe()
hold, go = os.pipe()
for _ in range(2):
    if os.fork() == 0:
        kept = bytearray({WANTED // 2})
        os.write(told, b"x")
        os.close(go)
        os.read(hold, 1)
        os._exit(0)
for _ in range(2):
    os.read(ready, 1)
os.close(go)
"""
UNREAD_CONNECTIONS = """
import socket
server = socket.create_server(("127.0.0.1", 0))
"""
LARGE_SOCKET_BUFFERS = """
import socket
ends = [end for _ in range(20) for end in socket.socketpair()]
for end in ends:
    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**30)
"""
SOCKETS_ON_THEIR_WAY = """
import socket
kept, away = socket.socketpair()
for _ in range(20):
    ends = socket.socketpair()
    for end in ends:
        end.setblocking(False)
        try:
            while True:
                end.send(bytes(2**15))
        except BlockingIOError:
            pass
    socket.send_fds(kept, [b"x"], [end.fileno() for end in ends])
    for end in ends:
        end.close()
"""


@pytest.mark.parametrize(
    "attack",
    [
        SHARED_MEMORY,
        MEMORY_FILE,
        FILES_IN_MEMORY,
        EMPTY_FILES,
        SEVERAL_PROCESSES,
        UNREAD_CONNECTIONS,
        LARGE_SOCKET_BUFFERS,
        SOCKETS_ON_THEIR_WAY,
    ],
    ids=["shm", "memfd", "tmpfs", "inodes", "processes", "sockets", "buffers", "in-flight"],
)
def test_no_memory_beside_the_address_space(sandbox: Sandbox, attack: str) -> None:
    assert succeeds_outside(attack)
    assert not attempt(sandbox, attack).passed


def test_the_address_space_is_limited(sandbox: Sandbox) -> None:
    assert attempt(sandbox, f"x = bytearray({LIMIT // 2})").passed
    assert "MemoryError" in attempt(sandbox, f"x = bytearray({LIMIT})").reason
    piling_up = "x = []\nwhile True: x.append(bytearray(10**6))"
    assert "MemoryError" in attempt(sandbox, piling_up).reason
    shared = f"import mmap; mmap.mmap(-1, {LIMIT})"
    assert not attempt(sandbox, shared).passed


def test_pairs_of_sockets_hold_little(sandbox: Sandbox) -> None:
    """All that one program can open, each full in both directions; asyncio needs a pair."""
    filled = """
import asyncio, socket
def f():
    assert asyncio.run(asyncio.sleep(0, 3)) == 3
    kinds = (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET)
    ends, held = [], 0
    try:
        while True:
            ends += socket.socketpair(socket.AF_UNIX, kinds[len(ends) % 3])
    except OSError:
        pass
    for end in ends:
        end.setblocking(False)
        for size in (2**17, 2**15, 1):
            try:
                while True:
                    held += end.send(bytes(size))
            except OSError:
                pass
    return held, len(ends)
"""
    test = f"held, ends = f()\nassert ends > 20 and 0 < held < {60 * MIB}, (held, ends)\n"
    verdict = sandbox.run(Trial(program=filled, test=test))
    assert verdict.passed, verdict.reason


def test_what_is_refused_is_refused_by_its_number(sandbox: Sandbox) -> None:
    numbers = {**syscalls.refused_calls(), "clone3": 435}
    called = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
def f(number):
    return libc.syscall(number, 0, 0, 0, 0, 0), ctypes.get_errno()
"""
    test = f"found = {{name: f(number) for name, number in {numbers!r}.items()}}\n"
    test += "assert found.pop('clone3') == (-1, 38)\n"
    test += "wrong = {name for name, result in found.items() if result != (-1, 1)}\n"
    test += "assert not wrong, wrong\n"
    verdict = sandbox.run(Trial(program=called, test=test))
    assert verdict.passed, verdict.reason


def test_what_is_refused_is_what_its_name_says(sandbox: Sandbox) -> None:
    """By the C library's own functions, which know the numbers."""
    called = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
CALLS = {
    "shmget": (0, 4096, 0o1600), "msgget": (0, 0o1600), "semget": (0, 1, 0o1600),
    "memfd_create": (b"x", 0), "inotify_init": (), "inotify_init1": (0,), "socket": (1, 1, 0),
    "setsockopt": (0, 1, 7, None, 0), "sendmsg": (0, None, 0), "sendmmsg": (0, None, 0, 0),
    "splice": (0, None, 1, None, 1, 0), "tee": (0, 1, 1, 0), "vmsplice": (1, None, 0, 0),
    "ptrace": (0, 0, None, None), "personality": (0xFFFFFFFF,), "fork": (),
    "process_vm_readv": (os.getpid(), None, 0, None, 0, 0),
    "process_vm_writev": (os.getpid(), None, 0, None, 0, 0),
    "mq_open": (b"/x", os.O_CREAT | os.O_RDWR, 0o600, None), "unshare": (0,),
}
def f():
    results = {}
    for name, given in CALLS.items():
        results[name] = getattr(libc, name)(*given), ctypes.get_errno()
    return results
"""
    test = "wrong = {name for name, result in f().items() if result != (-1, 1)}\n"
    test += "assert not wrong, wrong\n"
    verdict = sandbox.run(Trial(program=called, test=test))
    assert verdict.passed, verdict.reason
    outside = called + "for name, result in f().items():\n    assert result != (-1, 1), name\n"
    outside = outside.replace('"fork": (),', "")
    assert subprocess.run([sys.executable, "-c", outside], check=False).returncode == 0


def test_no_call_by_another_architecture(sandbox: Sandbox) -> None:
    """The same numbers mean other calls there."""
    if platform.machine() != "x86_64":
        return
    x32 = "import ctypes; ctypes.CDLL(None).syscall(0x40000000 | 39)"
    assert attempt(sandbox, x32).reason.startswith("exited early")
    by_interrupt = """
import ctypes, mmap
code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
code.write(b"\\xb8\\x14\\x00\\x00\\x00\\xcd\\x80\\xc3")  # getpid of i386, by int 0x80
ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))()
"""
    assert attempt(sandbox, by_interrupt).reason.startswith("exited early")
