"""Runs programs that nobody has read: bubblewrap's namespaces around limits of the kernel.

A program sees a read-only system, one small scratch folder and a Python with its standard library:
no network, not even this machine's own, no home folder, no other process, no variable. CPU time,
memory, processes, files and time are limited. What is left open are the kernel's system calls.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from trainer.errors import InputError

_NOBODY = 65534
_ETC = ("/etc/ld.so.cache", "/etc/alternatives")
_LAUNCH = """\
import resource as r, sys
with open("/proc/self/oom_score_adj", "w") as file:
    file.write("1000")
cpu, memory, processes, size = map(int, sys.argv[1:])
limits = {
    r.RLIMIT_CPU: cpu, r.RLIMIT_AS: memory, r.RLIMIT_NPROC: processes, r.RLIMIT_FSIZE: size,
    r.RLIMIT_CORE: 0, r.RLIMIT_NOFILE: 64,
}
for name, value in limits.items():
    r.setrlimit(name, (value, value))
token, program = sys.stdin.readline(), sys.stdin.read()
exec(compile(program, "program", "exec"), {"__name__": "__main__"})
sys.stderr.write(token)
"""
"""Runs in the sandbox. The token on the last line is what tells a program that came to its end from
one that left early with exit code 0."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a program may use up."""

    cpu_seconds: int = 10
    """Of each of its processes."""
    seconds: float = 30.0
    """On the clock; then all of it is killed."""
    memory: int = 512 * 1024**2
    """Bytes of address space of each process."""
    processes: int = 16
    file_size: int = 1024**2
    """Bytes of one file, and of what it says on stderr."""
    scratch: int = 16 * 1024**2
    """Bytes of all files together."""


@dataclass(frozen=True)
class Verdict:
    """How a program ended."""

    passed: bool
    """It ran to its end without an exception."""
    reason: str = ""
    """Why not, in a line."""


class Sandbox:
    """Where programs run, one by one or in several threads.

    As root, programs run as nobody, since the kernel limits no processes of root.

    Raises:
        InputError: bubblewrap is missing, or cannot make a sandbox on this machine.
    """

    def __init__(self, limits: Limits | None = None) -> None:
        self._limits = limits or Limits()
        self._running: set[subprocess.Popen[bytes]] = set()
        bwrap = shutil.which("bwrap")
        if bwrap is None:
            raise InputError(
                "bwrap is not installed, and a model's code runs in its sandbox alone: install the "
                "package bubblewrap, or leave out the task code"
            )
        own = Path(sys.base_prefix) / "bin" / "python3"
        reasons: list[str] = []
        for python in dict.fromkeys((own, Path("/usr/bin/python3"))):  # nobody may not reach ours
            self._command = _command(bwrap, python, self._limits)
            try:
                verdict = self.run("")
            except OSError as error:
                verdict = Verdict(False, f"{bwrap}: {error.strerror}")
            if verdict.passed:
                return
            reasons.append(verdict.reason)
        raise InputError(
            f"bwrap cannot make a sandbox here: {'; '.join(reasons)}; it takes bubblewrap 0.8 and "
            "user namespaces, else leave out the task code"
        )

    def run(self, program: str) -> Verdict:
        """Run a Python program."""
        token = secrets.token_hex(16)
        user = _NOBODY if os.geteuid() == 0 else None
        with tempfile.TemporaryFile() as errors:
            process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                cwd="/",
                env={},
                user=user,
                group=user,
                extra_groups=None if user is None else [],
            )
            self._running.add(process)
            try:
                source = f"{token}\n{program}".encode(errors="surrogatepass")
                process.communicate(source, timeout=self._limits.seconds)
            except subprocess.TimeoutExpired:
                return Verdict(False, f"ran for more than {self._limits.seconds:g} s")
            finally:
                process.kill()  # with it the first process of its namespace, and so all in it
                process.wait()
                self._running.discard(process)
            last = _last_line(errors)
        if process.returncode == 0 and last == token:
            return Verdict(True)
        if process.returncode == 0:
            return Verdict(False, "left before it came to its end")
        return Verdict(False, last[:200] or f"ended with {process.returncode}")

    def stop(self) -> None:
        """End all programs that run in other threads."""
        for process in tuple(self._running):
            process.kill()


def _command(bwrap: str, python: Path, limits: Limits) -> list[str]:
    nobody = str(_NOBODY)
    command = [bwrap, "--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent"]
    command += ["--new-session", "--clearenv", "--cap-drop", "ALL", "--hostname", "sandbox"]
    command += ["--uid", nobody, "--gid", nobody, "--ro-bind", "/usr", "/usr"]
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
    command += ["--proc", "/proc", "--dev", "/dev"]
    command += ["--size", str(limits.scratch), "--tmpfs", "/tmp"]  # noqa: S108 - the sandbox's own
    command += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp"]  # noqa: S108
    command += ["--", str(python), "-I", "-S", "-B", "-X", "utf8", "-c", _LAUNCH]
    numbers = limits.cpu_seconds, limits.memory, limits.processes, limits.file_size
    return command + [str(number) for number in numbers]


def _last_line(file: BinaryIO) -> str:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(size - 4096, 0))
    lines = file.read().decode(errors="replace").strip().split("\n")
    return lines[-1].strip()
