"""The sandbox against programs that try to get out or to use up the machine.

Each attack passes when it succeeds, and most are tried outside as well: one that could not succeed
anywhere would prove nothing.
"""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.trainer.evaluate.confinement import attempt, open_sandbox
from trainer.evaluate.sandbox import Limits, Sandbox, Trial
from trainer.system.errors import InputError

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    return open_sandbox(seconds=20, cpu_seconds=2)


def succeeds_outside(program: str) -> bool:
    return subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def in_sandbox() -> list[Path]:
    """Return the processes of any sandbox, by what they were started with."""
    found: list[Path] = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if b"oom_score_adj" in (folder / "cmdline").read_bytes():
                found.append(folder)
        except OSError:
            continue
    return found


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    """Nothing of a program survives its verdict."""
    yield
    deadline = time.monotonic() + 20
    while (left := in_sandbox()) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not left


def test_a_program_passes_or_says_why_not(sandbox: Sandbox) -> None:
    right = "import json, math, re\nassert math.comb(5, 2) == 10\nprint('π')"
    assert attempt(sandbox, right).passed
    verdict = attempt(sandbox, "assert 1 + 1 == 3, 'wrong sum'")
    assert (verdict.passed, verdict.reason) == (False, "AssertionError: wrong sum")
    assert "SyntaxError" in attempt(sandbox, "def f(:").reason
    assert not attempt(sandbox, "'\ud800'.encode()").passed


def test_no_network_not_even_this_machine(sandbox: Sandbox) -> None:
    name = secrets.token_hex(8)
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_UNIX) as abstract,
    ):
        abstract.bind(f"\0{name}")
        abstract.listen()
        address = tcp.getsockname()
        for attack in (
            f"import socket; socket.create_connection({address!r}, 2)",
            f"import socket; socket.socket(socket.AF_UNIX).connect({chr(0) + name!r})",
        ):
            assert succeeds_outside(attack)
            assert not attempt(sandbox, attack).passed
    interfaces = "assert [line.split()[0] for line in open('/proc/net/dev')][2:] == ['lo:']"
    assert attempt(sandbox, interfaces).passed


def test_no_home_and_no_file_of_others(sandbox: Sandbox, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    with tempfile.NamedTemporaryFile(dir=Path.home()) as at_home:
        for path in (secret, at_home.name, "/etc/passwd", __file__):
            attack = f"open({str(path)!r}).read(1)"
            assert succeeds_outside(attack)
            assert "FileNotFoundError" in attempt(sandbox, attack).reason


def test_nothing_outside_can_be_written(sandbox: Sandbox, tmp_path: Path) -> None:
    name = f"motley-{secrets.token_hex(8)}"
    for folder in (tmp_path, Path.home(), "/", "/usr", "/usr/lib", "/etc", "/dev", "/dev/shm"):
        path = Path(folder, name)
        assert not attempt(sandbox, f"open({str(path)!r}, 'w')").passed
        assert not path.exists()
    assert attempt(sandbox, "open('/dev/null', 'w')").passed
    # What is writable is decided for each mount; whole trees would take as long as a disk is full.
    everywhere = """
import os
mounts = {line.split()[4] for line in open("/proc/self/mountinfo")}
assert "/" in mounts
for mount in mounts:
    for folder, folders, _ in os.walk(mount):
        if folder.startswith("/proc") or folder.count("/") > mount.count("/") + 2:
            folders.clear()
            continue
        try:
            open(folder + "/x", "w")
        except OSError:
            continue
        raise AssertionError(folder)
"""
    assert attempt(sandbox, everywhere).passed, "not even a scratch folder"


def test_no_variables_and_no_processes_of_others(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN_OF_MINE", "secret")
    attack = "import os; assert 'TOKEN_OF_MINE' in os.environ"
    assert succeeds_outside(attack)
    assert not attempt(sandbox, attack).passed
    attack = f"import os; os.kill({os.getpid()}, 0)"
    assert succeeds_outside(attack)
    assert "ProcessLookupError" in attempt(sandbox, attack).reason


def test_rights_cannot_be_gained(sandbox: Sandbox) -> None:
    assert attempt(sandbox, "import os; assert os.getuid() == os.geteuid() == 65534").passed
    for attack in (
        "import os; os.setuid(0)",
        "import resource as r; r.setrlimit(r.RLIMIT_NPROC, (10**6, 10**6))",
        "import ctypes; assert ctypes.CDLL(None).unshare(0x10000000) == 0  # a user namespace",
        "import ctypes; assert ctypes.CDLL(None).mount(b'x', b'/tmp', b'tmpfs', 0, None) == 0",
    ):
        assert not attempt(sandbox, attack).passed, attack


def test_threads_and_no_further_processes(sandbox: Sandbox) -> None:
    threads = """
import asyncio, threading
done = []
for _ in range(4):
    thread = threading.Thread(target=done.append, args=(1,))
    thread.start()
    thread.join()
asyncio.run(asyncio.sleep(0))
assert len(done) == 4
"""
    assert attempt(sandbox, threads).passed
    for attack in (
        "import os\nwhile True: os.fork()",
        "import subprocess; subprocess.run(['/bin/true'])",
        "import os; os.posix_spawn('/bin/true', ['true'], {})",
        "import multiprocessing as m; p = m.Process(target=print); p.start(); p.join()",
    ):
        assert "Operation not permitted" in attempt(sandbox, attack).reason, attack
    many = """
import threading, time
made = 0
try:
    for _ in range(100):
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        made += 1
except RuntimeError:
    assert 4 <= made < 16, made
else:
    raise AssertionError("no limit")
"""
    assert attempt(sandbox, many).passed


@pytest.mark.long
def test_endless_programs() -> None:
    try:
        sandbox = Sandbox(Limits(cpu_seconds=1, seconds=4))
    except InputError as error:
        pytest.skip(f"needs bwrap: {error}")
    assert not attempt(sandbox, "while True: pass").passed
    assert attempt(sandbox, "import time; time.sleep(1000)").reason == "ran for more than 4 s"


def test_floods(sandbox: Sandbox) -> None:
    assert not attempt(sandbox, "import os\nwhile True: os.write(2, b'x' * 10**5)").passed
    assert attempt(sandbox, "print('x' * 10**8)").passed, "what it says leads nowhere"
    filled = "import os\nfor number in range(3, 64):\n    try:\n        while True: "
    filled += "os.write(number, b'x' * 10**5)\n    except OSError: pass\n"
    assert sandbox.run(Trial(program=filled, test="")).reason == "x" * 200, "a file of 1 MiB"


def test_without_bwrap_it_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match="install the package bubblewrap"):
        Sandbox()
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho 'no namespaces' >&2\nexit 1\n")
    broken.chmod(0o755)
    tmp_path.chmod(0o755)
    with pytest.raises(InputError, match="cannot make a sandbox here"):
        Sandbox()
