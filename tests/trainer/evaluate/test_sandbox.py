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

from trainer.errors import InputError
from trainer.evaluate.sandbox import Limits, Sandbox


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    try:
        return Sandbox(Limits(seconds=20, cpu_seconds=2))
    except InputError as error:
        pytest.skip(f"needs bwrap: {error}")


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
    assert sandbox.run("import json, math, re\nassert math.comb(5, 2) == 10\nprint('π')").passed
    verdict = sandbox.run("assert 1 + 1 == 3, 'wrong sum'")
    assert (verdict.passed, verdict.reason) == (False, "AssertionError: wrong sum")
    assert "SyntaxError" in sandbox.run("def f(:").reason
    assert not sandbox.run("'\ud800'").passed


@pytest.mark.parametrize(
    "program", ["import os; os._exit(0)", "raise SystemExit", "import sys; sys.exit(0)"]
)
def test_leaving_early_is_not_passing(sandbox: Sandbox, program: str) -> None:
    assert sandbox.run(program + "\nassert False").reason == "left before it came to its end"


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
            assert not sandbox.run(attack).passed
    interfaces = "import socket; assert [n for _, n in socket.if_nameindex()] == ['lo']"
    assert sandbox.run(interfaces).passed


def test_no_home_and_no_file_of_others(sandbox: Sandbox, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    with tempfile.NamedTemporaryFile(dir=Path.home()) as at_home:
        for path in (secret, at_home.name, "/etc/passwd", __file__):
            attack = f"open({str(path)!r}).read(1)"
            assert succeeds_outside(attack)
            assert "FileNotFoundError" in sandbox.run(attack).reason


def test_nothing_outside_can_be_written(sandbox: Sandbox, tmp_path: Path) -> None:
    name = f"motley-{secrets.token_hex(8)}"
    for folder in (tmp_path, Path.home(), "/", "/usr", "/usr/lib", "/etc", "/dev", "/dev/shm"):
        path = Path(folder, name)
        assert not sandbox.run(f"open({str(path)!r}, 'w')").passed
        assert not path.exists()
    scratch = f"/tmp/{name}"
    assert sandbox.run(f"open({scratch!r}, 'w').write('x'); open('/dev/null', 'w')").passed
    assert not Path(scratch).exists()
    assert not sandbox.run(f"assert open({scratch!r}).read()").passed, "each starts afresh"


def test_no_variables_and_no_processes_of_others(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN_OF_MINE", "secret")
    attack = "import os; assert 'TOKEN_OF_MINE' in os.environ"
    assert succeeds_outside(attack)
    assert not sandbox.run(attack).passed
    attack = f"import os; os.kill({os.getpid()}, 0)"
    assert succeeds_outside(attack)
    assert "ProcessLookupError" in sandbox.run(attack).reason


def test_rights_cannot_be_gained(sandbox: Sandbox) -> None:
    assert sandbox.run("import os; assert os.getuid() == os.geteuid() == 65534").passed
    for attack in (
        "import os; os.setuid(0)",
        "import resource as r; r.setrlimit(r.RLIMIT_NPROC, (10**6, 10**6))",
        "import ctypes; assert ctypes.CDLL(None).unshare(0x10000000) == 0  # a user namespace",
        "import ctypes; assert ctypes.CDLL(None).mount(b'x', b'/tmp', b'tmpfs', 0, None) == 0",
    ):
        assert not sandbox.run(attack).passed, attack


def test_a_fork_bomb(sandbox: Sandbox) -> None:
    verdict = sandbox.run("import os\nwhile True: os.fork()")
    assert not verdict.passed
    count = """
import os, time
made = 0
try:
    for _ in range(100):
        if os.fork() == 0:
            time.sleep(60)
        made += 1
except BlockingIOError:
    assert 8 <= made < 16, made
else:
    raise AssertionError("no limit")
"""
    assert sandbox.run(count).passed


def test_a_memory_hog(sandbox: Sandbox) -> None:
    assert "MemoryError" in sandbox.run("x = bytearray(2 * 1024**3)").reason
    assert not sandbox.run("x = []\nwhile True: x.append(bytearray(10**6))").passed


@pytest.mark.slow
def test_endless_programs() -> None:
    try:
        sandbox = Sandbox(Limits(cpu_seconds=1, seconds=4))
    except InputError as error:
        pytest.skip(f"needs bwrap: {error}")
    assert not sandbox.run("while True: pass").passed
    assert sandbox.run("import time; time.sleep(1000)").reason == "ran for more than 4 s"


def test_floods(sandbox: Sandbox) -> None:
    verdict = sandbox.run("import os\nwhile True: os.write(2, b'x' * 10**5)")
    assert (verdict.passed, verdict.reason) == (False, "x" * 200), "no room even for the exception"
    assert "OSError" in sandbox.run("open('/tmp/x', 'wb').write(b'x' * 10**8)").reason
    many = "for i in range(1000): open(f'/tmp/{i}', 'wb').write(b'x' * 10**6)"
    assert "No space left" in sandbox.run(many).reason
    assert sandbox.run("print('x' * 10**8)").passed, "stdout leads nowhere"


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
