"""Programs forked from a process that has imported torch, the trainer and the launcher.

Those imports are most of what a short program costs, and the tests start hundreds. The fork server
is the standard library's (`multiprocessing`): each process of pytest has its own, started at need,
which imports `tests.preloaded` and forks at every start. A forked program has a session,
environment, folder and streams of its own. What proves imports, documented commands or other
interpreters starts from nothing.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import resource
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from io import TextIOWrapper
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TextIO

from tests.waiting import PATIENCE

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.preloaded", __name__])


class Program:
    """`python -m MODULE ...` that runs, to be used as a `subprocess.Popen`.

    Args:
        command: `[sys.executable, "-m", MODULE, ...]`.
        environment: all of it.
        folder: where it runs; default: here.
        log: a file for both outputs; without one they come through the pipes `stdout` and `stderr`.
        limits: soft limits of resources, such as `{resource.RLIMIT_NOFILE: 256}`.
    """

    stdout: TextIO
    stderr: TextIO

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        folder: Path | None = None,
        log: Path | None = None,
        limits: Mapping[int, int] | None = None,
    ) -> None:
        assert tuple(command[:2]) == (sys.executable, "-m")
        outputs: list[Path | Connection]
        if log:
            log.touch()  # a test may read the file before the program has started
            outputs = [log.absolute()] * 2
        else:
            (self.stdout, out), (self.stderr, error) = _pipe(), _pipe()
            outputs = [out, error]
        self._process = CONTEXT.Process(
            target=_become,
            args=(command[2:], dict(environment), (folder or Path.cwd()).absolute()),
            kwargs={"outputs": outputs, "limits": dict(limits or {})},
            daemon=True,  # none outlives the tests
        )
        self._process.start()
        for output in outputs:
            if isinstance(output, Connection):
                output.close()
        assert self._process.pid
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """How it ended, negative for a signal; None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """Return how it ended; None while it runs."""
        return self.returncode

    def wait(self, timeout: float = PATIENCE) -> int:
        """Return how it ended.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
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
                self.send_signal(signal.SIGKILL)  # else the threads would read for ever
                raise
            return texts[0].result(), texts[1].result()

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        os.kill(self.pid, number)


def run(
    command: Sequence[str],
    environment: Mapping[str, str],
    timeout: float = PATIENCE,
    folder: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end.

    Raises:
        subprocess.TimeoutExpired: it did not end, and is killed.
    """
    program = Program(command, environment, folder)
    output, error = program.communicate(timeout)
    return subprocess.CompletedProcess(command, program.wait(), output, error)


def _pipe() -> tuple[TextIO, Connection]:
    reading, writing = CONTEXT.Pipe(duplex=False)
    with reading:
        return os.fdopen(os.dup(reading.fileno()), encoding="utf-8"), writing


def become(environment: Mapping[str, str], outputs: Sequence[Path | Connection]) -> None:
    """Take on, in a fork, what a start from nothing would have given."""
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    multiprocessing.current_process().daemon = False  # it may have children
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, output in enumerate(outputs, 1):
        if isinstance(output, Path):
            output = output.open("ab", buffering=0)
        with output:
            os.dup2(output.fileno(), number)
    assert isinstance(sys.stdout, TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=sys.stdout.isatty())


def _become(
    words: Sequence[str],
    environment: Mapping[str, str],
    folder: Path,
    outputs: Sequence[Path | Connection],
    limits: Mapping[int, int],
) -> None:
    """Be a program; the end leaves the clearing of a thousand modules to the kernel."""
    become(environment, outputs)
    os.chdir(folder)
    for kind, soft in limits.items():
        resource.setrlimit(kind, (soft, resource.getrlimit(kind)[1]))
    sys.argv = list(words)
    sys.modules.pop(words[0], None)  # it is run and not imported
    try:
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    finally:
        threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
        atexit._run_exitfuncs()
