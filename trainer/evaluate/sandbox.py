"""Runs untrusted programs: bubblewrap's namespaces with limits of the kernel.

A sandbox has a read-only system and a Python with its standard library. Covered, whatever the
program does:

- other machines and this one: no network, not even loopback
- files: no home folder, no writable folder, nothing of others to read
- processes and variables of others: none is there to be seen
- the machine: one process with threads, limits of CPU time, time, address space, files and output;
  system calls that take other kinds of memory are refused (`trainer.evaluate.syscalls`), so the
  process's limits are the sandbox's, for an ordinary user too
- leaving early: `exit`, `_exit` or another program in its place is not a pass

Not covered: a program that forges its verdict. Program and tests share one interpreter, as in
HumanEval's own harness, so code that sets out to can read the tests, replace what they use, or look
for the line that tells of their end. Read the passes before you reward a model for them.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, BinaryIO

from trainer.evaluate.syscalls import seccomp_filter
from trainer.system.errors import InputError

_NOBODY = 65534
_ETC = ("/etc/ld.so.cache", "/etc/alternatives")
_CHILD = Path(__file__).with_name("sandboxed_child.py")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of a trial."""

    cpu_seconds: int = 10
    seconds: float = 30.0
    """Wall-clock time, after which all is killed."""
    memory: int = 512 * 1024**2
    """Bytes of address space; buffers of pipes and socket pairs add at most 60 MiB."""
    threads: int = 16
    """Including bubblewrap's own process outside."""
    output: int = 1024**2
    """Bytes of a file that it writes."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A program and its tests."""

    program: str
    """Untrusted source."""
    test: str
    """Source that follows it, and raises if it is wrong."""


@dataclass(frozen=True)
class TrialResult:
    """How a trial ended."""

    passed: bool
    """The tests finished without an exception."""
    reason: str = ""
    """Why not, in one line."""


class Sandbox:
    """Runs trials, one by one or in several threads.

    As root, programs run as the user nobody, since the kernel does not limit root's threads.

    Raises:
        InputError: bubblewrap is missing, or cannot make a sandbox on this machine.
    """

    def __init__(self, limits: Limits | None = None) -> None:
        self._limits = limits or Limits()
        self._filter = seccomp_filter()
        self._running: set[subprocess.Popen[bytes]] = set()
        bwrap = shutil.which("bwrap")
        if bwrap is None:
            raise InputError(
                "bwrap is not installed, and a model's code runs only in its sandbox: install the "
                "package bubblewrap, or leave out the task code"
            )
        own = Path(sys.base_prefix) / "bin" / "python3"
        reasons: list[str] = []
        # The user nobody may not reach ours.
        for python in dict.fromkeys((own, Path("/usr/bin/python3"))):
            self._bwrap = _build_bwrap_command(bwrap, python)
            self._python = [str(python), "-I", "-S", "-B", "-X", "utf8", "-c", _CHILD.read_text()]
            try:
                verdict = self.run(Trial(program="def f(): pass", test="f()"))
            except OSError as error:
                verdict = TrialResult(False, f"{bwrap}: {error.strerror}")
            if verdict.passed:
                return
            reasons.append(verdict.reason)
        raise InputError(
            f"bwrap cannot make a sandbox here: {'; '.join(reasons)}; it needs bubblewrap 0.8 and "
            "user namespaces, else leave out the task code"
        )

    def run(self, trial: Trial) -> TrialResult:
        """Run a program and its tests."""
        token = secrets.token_hex(16)
        source = f"{token}\n{trial.program}\n{trial.test}\n".encode(errors="surrogatepass")
        with tempfile.TemporaryFile() as errors, ExitStack() as stack:
            process = self._start(errors)
            stack.callback(self._end, process)
            try:
                with suppress(BrokenPipeError):  # its exit code and stderr tell more
                    process.communicate(source, timeout=self._limits.seconds)
            except subprocess.TimeoutExpired:
                return TrialResult(False, f"ran for more than {self._limits.seconds:g} s")
            process.wait()
            reason = _last_line(errors)[:200]
            if process.returncode == 0 and reason == token:
                return TrialResult(True)
            return TrialResult(False, reason or f"exited early with code {process.returncode}")

    def stop(self) -> None:
        """End all trials that run in other threads."""
        for process in tuple(self._running):
            process.kill()

    def _start(self, errors: IO[bytes]) -> subprocess.Popen[bytes]:
        limits = self._limits
        numbers = limits.cpu_seconds, limits.memory, limits.threads, limits.output
        source, fill = os.pipe()
        try:
            os.write(fill, self._filter)  # far smaller than a pipe's buffer
            os.close(fill)
            user = _NOBODY if os.geteuid() == 0 else None
            process = subprocess.Popen(
                [*self._bwrap, "--seccomp", str(source), "--", *self._python]
                + [str(number) for number in numbers],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                pass_fds=(source,),
                cwd="/",
                env={},
                user=user,
                group=user,
                extra_groups=None if user is None else [],
            )
        finally:
            os.close(source)
        self._running.add(process)
        return process

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        process.kill()  # and so the first process of its namespace, with all others in it
        process.wait()
        if process.stdin:
            with suppress(BrokenPipeError):
                process.stdin.close()
        self._running.discard(process)


def _build_bwrap_command(bwrap: str, python: Path) -> list[str]:
    nobody = str(_NOBODY)
    command = [bwrap, "--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent"]
    # As process 1: bubblewrap's own would be a second process without our limits.
    command += ["--as-pid-1", "--new-session", "--clearenv", "--cap-drop", "ALL"]
    command += [
        "--hostname",
        "sandbox",
        "--uid",
        nobody,
        "--gid",
        nobody,
        "--ro-bind",
        "/usr",
        "/usr",
    ]
    for path in map(Path, ("/bin", "/sbin", "/lib", "/lib32", "/lib64")):
        if path.is_symlink():
            command += ["--symlink", str(path.readlink()), str(path)]
        elif path.is_dir():
            command += ["--ro-bind", str(path), str(path)]
    for name in _ETC:
        command += ["--ro-bind-try", name, name]
    home = python.parents[1]
    if not home.is_relative_to("/usr"):
        command += ["--ro-bind", str(home), str(home)]
    # Nothing is writable: a tmpfs limits sizes only, and empty files alone would fill the memory.
    command += ["--proc", "/proc", "--dev", "/dev", "--dir", "/tmp"]  # noqa: S108
    return [*command, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp"]  # noqa: S108


def _last_line(file: BinaryIO) -> str:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(size - 4096, 0))
    lines = file.read().decode(errors="replace").strip().split("\n")
    return "".join(char if char.isprintable() else "?" for char in lines[-1].strip())
