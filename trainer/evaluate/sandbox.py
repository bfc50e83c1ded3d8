"""Runs untrusted programs: bubblewrap's namespaces with limits of the kernel.

A trial has two sandboxes. One runs the program, the other its tests, and they exchange data alone
(`trainer.evaluate.boxed`), so the program cannot influence the verdict: that the tests finish.
Neither the tests nor their expected values are ever in the program's sandbox.

A sandbox has a read-only system and a Python with its standard library: no network, not even
loopback, no home folder, no writable folder, no other process, no variable. It is one process with
threads. CPU time, time, address space, files and output are limited, and system calls that take
other kinds of memory are refused (`trainer.evaluate.syscalls`). So the process's limits are the
sandbox's, for an ordinary user too.
"""

from __future__ import annotations

import json
import os
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
_BOXED = Path(__file__).with_name("boxed.py")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of each of a trial's two sandboxes."""

    cpu_seconds: int = 10
    seconds: float = 30.0
    """Wall-clock time, after which all is killed."""
    memory: int = 512 * 1024**2
    """Bytes of address space; buffers of pipes and socket pairs add at most 60 MiB."""
    threads: int = 16
    """Including bubblewrap's own process outside."""
    output: int = 1024**2
    """Bytes of stderr."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A program and its tests."""

    program: str
    """Untrusted source; defines the function."""
    entry_point: str
    """The function's name."""
    test: str
    """Trusted source that calls the function by its name, and raises if it is wrong."""
    given: str = ""
    """Further trusted source for the tests."""


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
            self._bwrap = _bwrap(bwrap, python)
            self._python = [str(python), "-I", "-S", "-B", "-X", "utf8", "-c", _BOXED.read_text()]
            try:
                verdict = self.run(Trial(program="def f(): pass", entry_point="f", test="f()"))
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
        """Run a program's tests."""
        job = json.dumps(vars(trial)).encode()
        with tempfile.TemporaryFile() as errors, ExitStack() as stack:
            pipes = [os.pipe(), os.pipe()]
            ends = [end for pipe in pipes for end in pipe]
            try:
                (asked, asking), (answers, answering) = pipes
                program = self._start("program", stdin=asked, stdout=answering)
                stack.callback(self._end, program)
                tests = self._start("tests", asking, answers, stdin=subprocess.PIPE, stderr=errors)
                stack.callback(self._end, tests)
            finally:
                for end in ends:
                    os.close(end)
            try:
                with suppress(BrokenPipeError):  # its exit code and stderr tell more
                    tests.communicate(job, timeout=self._limits.seconds)
            except subprocess.TimeoutExpired:
                return TrialResult(False, f"ran for more than {self._limits.seconds:g} s")
            tests.wait()
            if tests.returncode == 0:
                return TrialResult(True)
            return TrialResult(False, _last_line(errors)[:200] or f"ended with {tests.returncode}")

    def stop(self) -> None:
        """End all trials that run in other threads."""
        for process in tuple(self._running):
            process.kill()

    def _start(
        self,
        part: str,
        *ends: int,
        stdin: int,
        stdout: int = subprocess.DEVNULL,
        stderr: int | IO[bytes] = subprocess.DEVNULL,
    ) -> subprocess.Popen[bytes]:
        """Start one of the two sandboxes with its ends of the pipes between them."""
        limits = self._limits
        numbers = limits.cpu_seconds, limits.memory, limits.threads, limits.output, *ends
        source, fill = os.pipe()
        try:
            os.write(fill, self._filter)  # far smaller than a pipe's buffer
            os.close(fill)
            user = _NOBODY if os.geteuid() == 0 else None
            process = subprocess.Popen(
                [*self._bwrap, "--seccomp", str(source), "--", *self._python, part]
                + [str(number) for number in numbers],
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                pass_fds=(source, *ends),
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


def _bwrap(bwrap: str, python: Path) -> list[str]:
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
