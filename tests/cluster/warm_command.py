"""Commands as a user types them, from the fork server: their outputs come through pipes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TextIO

from tests.cluster.fork_server import ForkServer
from tests.cluster.real_process import fork_server
from tests.waiting import PATIENCE


class WarmCommand:
    """A command that runs, to be used as a `subprocess.Popen` with pipes.

    Args:
        command: `[sys.executable, "-m", MODULE, ...]`.
        environment: all of it.
        server: what forks it; by default the test session's.
        folder: where it runs; default: here.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        server: ForkServer | None = None,
        folder: Path | None = None,
    ) -> None:
        assert tuple(command[:2]) == (sys.executable, "-m")
        package = "trainer" if command[2].startswith("trainer.") else "launcher"
        with ExitStack() as here:
            stdin = here.enter_context(Path(os.devnull).open("rb"))
            streams = [stdin.fileno()]
            self.stdout, self.stderr = (_pipe(here, streams) for _ in range(2))
            self._process = (server or fork_server(package)).start(
                command[1:],
                folder or Path.cwd(),
                environment,
                (streams[0], streams[1], streams[2]),
            )
        self.pid = self._process.pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return how it ended; None while it runs."""
        self.returncode = self._process.poll()
        return self.returncode

    def wait(self, timeout: float = PATIENCE) -> int:
        """Return how it ended.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        self.returncode = self._process.wait(timeout)
        return self.returncode

    def communicate(self, timeout: float = PATIENCE) -> tuple[str, str]:
        """Return what it has still written to both streams once it has ended.

        Raises:
            subprocess.TimeoutExpired: it did not end, and is killed.
        """
        with self.stdout, self.stderr, ThreadPoolExecutor(2) as threads:
            texts = [threads.submit(stream.read) for stream in (self.stdout, self.stderr)]
            try:
                self.wait(timeout)
            except BaseException:
                self.kill()  # else the threads would read for ever
                raise
            return texts[0].result(), texts[1].result()

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """End it the hard way."""
        self.send_signal(signal.SIGKILL)


def run(
    command: Sequence[str],
    environment: Mapping[str, str],
    timeout: float = PATIENCE,
    server: ForkServer | None = None,
    folder: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end.

    Raises:
        subprocess.TimeoutExpired: it did not end, and is killed.
    """
    process = WarmCommand(command, environment, server, folder)
    output, error = process.communicate(timeout)
    assert process.returncode is not None
    return subprocess.CompletedProcess(command, process.returncode, output, error)


def _pipe(here: ExitStack, streams: list[int]) -> TextIO:
    """Return one end of a pipe; the other is open as long as `here` is."""
    reading, writing = os.pipe()
    here.callback(os.close, writing)
    streams.append(writing)
    return os.fdopen(reading, encoding="utf-8")
