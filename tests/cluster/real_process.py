"""One real process under test, and waiting for what it does."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from tests.forked import Program
from tests.waiting import PATIENCE, wait_for

_READ_BY_IMPORTS = frozenset({"PYTHONPATH", "LD_PRELOAD"})


def signal_aside(pid: int, number: signal.Signals) -> None:
    """Let another thread than the main one take a signal, which then does not end a wait.

    Rarely, one that comes just before the main thread begins to wait has the same effect.
    """
    threads = [int(entry.name) for entry in Path(f"/proc/{pid}/task").iterdir()]
    aside = next(thread for thread in threads if thread != pid)
    assert ctypes.CDLL(None, use_errno=True).tgkill(pid, aside, number) == 0, ctypes.get_errno()


class Process:
    """A process in its own process group, with a log.

    A Python that needs nothing special is forked from one that has imported what trainers import.

    Args:
        limits: soft limits of resources that it starts with.
    """

    def __init__(
        self,
        name: str,
        command: list[str],
        folder: Path,
        environment: dict[str, str],
        limits: Mapping[int, int] | None = None,
    ) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        self.started = time.monotonic()
        whole = {**os.environ, **environment}
        self._popen: subprocess.Popen[bytes] | Program
        if command[0] == sys.executable and _READ_BY_IMPORTS.isdisjoint(environment):
            self._popen = Program(command, whole, folder, self.log, limits)
        else:
            assert not limits, "only a forked program sets them"
            with self.log.open("ab") as log:
                self._popen = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    env=whole,
                )
        self.pid = self._popen.pid

    def wait(self, seconds: float = PATIENCE) -> int:
        """Return the exit code, negative for a signal."""
        try:
            return self._popen.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} still runs after {seconds} s") from None

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to this one process."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """End it the hard way."""
        self.signal(signal.SIGKILL)
        assert self.wait() == -signal.SIGKILL

    def end(self) -> None:
        """End the whole group."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._popen.wait(PATIENCE)

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self._popen.poll() is None

    @property
    def text(self) -> str:
        """What it has written so far."""
        return self.log.read_text(errors="replace")

    def says(self, words: str) -> None:
        """Wait until its log contains some words."""
        wait_for(lambda: words in self.text, f"{self.name}: {words!r}")
