"""Processes of this machine: who they are, and running one with a deadline."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.testbed.errors import LabError

Completed = subprocess.CompletedProcess[str]


def _status(pid: int) -> list[str] | None:
    """Return state, parent, ... of /proc/PID/stat (the fields after the name), None when gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else fields


@dataclass(frozen=True)
class Process:
    """One process; its start time tells it from a later one of the same number."""

    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> Process | None:
        """Return the process of this number, None when there is none."""
        fields = _status(pid)
        return cls(pid, int(fields[19])) if fields else None

    @property
    def alive(self) -> bool:
        """Whether it runs (a zombie does not)."""
        return Process.of(self.pid) == self

    def kill(self) -> None:
        """Send SIGKILL, if it is still this process."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):  # it ended by itself just now
                os.kill(self.pid, signal.SIGKILL)


def everyone() -> Iterator[int]:
    """Yield the numbers of all processes that this one sees."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            yield int(entry.name)


def children(pid: int) -> list[int]:
    """Return the direct children of a process."""
    found = []
    for candidate in everyone():
        fields = _status(candidate)
        if fields and int(fields[1]) == pid:
            found.append(candidate)
    return found


def command_line(pid: int) -> list[str]:
    """Return a process's arguments, empty when it is gone."""
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return []
    return raw.decode(errors="replace").split("\0")[:-1]


def wait_until(condition: Callable[[], bool], seconds: float, complaint: str) -> None:
    """Poll a condition that nothing announces; raise LabError when the deadline passes."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise LabError(f"{complaint} within {seconds:g} s")
        time.sleep(0.02)


def run(
    argv: Sequence[str | os.PathLike[str]],
    *,
    timeout: float = 60,
    check: bool = True,
    input: str | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Completed:
    """Run a command to its end with both outputs caught; its whole session dies with the deadline.

    Raises LabError on a non-zero status if `check`, and always when it ran past `timeout` seconds.
    """
    words = [os.fspath(word) for word in argv]
    with subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL if input is None else subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=env,
        cwd=cwd,
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(input, timeout)
        except BaseException as error:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                raise LabError(f"{' '.join(words)}: not done after {timeout:g} s") from None
            raise
    done = subprocess.CompletedProcess(words, process.returncode, out, err)
    if check and done.returncode != 0:
        last = (err.strip() or out.strip() or "no output").splitlines()[-8:]
        raise LabError(f"{' '.join(words)}: exit {done.returncode}: " + " | ".join(last))
    return done
