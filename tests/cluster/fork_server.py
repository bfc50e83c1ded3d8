"""Starts trainers as a supervisor does (`trainer/process/prefork.py`): imported once, then forked.

The imports are most of what a short-lived trainer costs, and the tests here start hundreds.
A forked one is a process of its own, in a session of its own, with its own environment, folder and
log, and it ends as any interpreter does. Tests of imports, limits and other environments start
theirs from nothing.

As a program: forks a process for each JSON line on the socket that is its stdin, and says of each
how it ended: `python -m tests.cluster.fork_server`.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import pkgutil
import runpy
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests import ROOT

_LEFT_TO_THE_FORKED = ("wgpu", "published", "generator", "harness", "__main__")
"""Parts of names of modules that few import, open a device, or cost seconds."""
_NO_THREADS = {
    "OPENBLAS_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}
"""NumPy and pyarrow start threads as they are imported, and a fork has but one."""
_LINE = 1 << 20


class Forked:
    """A forked process, to be used as a `subprocess.Popen`."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self.pid = pid
        self._server = server

    def poll(self) -> int | None:
        """Return how it ended, negative for a signal; None while it runs."""
        return self._server.returncode(self.pid, 0.0)

    def wait(self, timeout: float) -> int:
        """Return how it ended.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        returncode = self._server.returncode(self.pid, timeout)
        if returncode is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        return returncode


class ForkServer:
    """The program, which ends with the process that started it."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "tests.cluster.fork_server"]
        environment = {**os.environ, **_NO_THREADS}
        with theirs:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,
            )
        self._pids: list[int] = []
        self._ended: dict[int, int] = {}

    def start(
        self, argv: Sequence[str], folder: Path, environment: Mapping[str, str], log: Path
    ) -> Forked:
        """Start `python -m MODULE ...` in a folder with a whole environment; it writes to a log."""
        request = {
            "argv": argv,
            "folder": str(folder.absolute()),
            "environment": dict(environment),
            "log": str(log.absolute()),
        }
        log.touch()
        self._socket.settimeout(None)
        self._socket.send(json.dumps(request).encode())
        while not self._pids:
            self._read(60.0)
        return Forked(self, self._pids.pop())

    def returncode(self, pid: int, patience: float) -> int | None:
        """Return how a process ended; None if it did not within so many seconds."""
        deadline = time.monotonic() + patience
        while pid not in self._ended:
            try:
                self._read(deadline - time.monotonic())
            except (TimeoutError, BlockingIOError):
                return None
        return self._ended[pid]

    def _read(self, patience: float) -> None:
        self._socket.settimeout(max(patience, 0.0))
        message = json.loads(self._socket.recv(_LINE))
        if "ended" in message:
            self._ended[message["ended"]] = message["returncode"]
        else:
            self._pids.append(message["pid"])


def main() -> None:
    """Serve until the other end is closed; returns in every forked process."""
    import trainer

    for module in pkgutil.walk_packages(trainer.__path__, "trainer."):
        if not any(part in module.name for part in _LEFT_TO_THE_FORKED):
            importlib.import_module(module.name)
    threads = len(list(Path("/proc/self/task").iterdir()))
    assert threads == 1, f"{threads} threads run after the imports"
    gc.collect()
    gc.freeze()  # a collection in a child would write to, and so copy, every page
    requests = socket.socket(fileno=0)
    selector = selectors.DefaultSelector()
    selector.register(requests, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj is not requests:
                selector.unregister(key.fileobj)
                os.close(key.fd)
                _, status = os.waitpid(key.data, 0)
                ended = {"ended": key.data, "returncode": os.waitstatus_to_exitcode(status)}
                requests.send(json.dumps(ended).encode())
                continue
            line = requests.recv(_LINE)
            if not line:
                sys.exit(0)
            pid = os.fork()
            if pid == 0:
                selector.close()
                requests.detach()
                _become(json.loads(line))
                return
            selector.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)
            requests.send(json.dumps({"pid": pid}).encode())


def _become(request: dict) -> None:
    """Take on what a start from nothing would have given."""
    os.setsid()
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    output = os.open(request["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.closerange(3, 1 << 16)
    sys.argv = request["argv"]


if __name__ == "__main__":
    main()
    assert sys.argv.pop(0) == "-m"
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
