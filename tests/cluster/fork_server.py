"""Starts `trainer` or `launch` from a process that has imported it, and forks.

The imports are most of what a short-lived process costs, and the tests here start hundreds
(`trainer/system/process/prefork.py` is the same idea, for the workers of a supervisor). A forked
one is a process of its own, in a session of its own, with its own environment, folder and streams.
Tests of imports and of other interpreters start theirs from nothing.

As a program: forks a process for each request on the socket that is its stdin, and says of each
how it ended: `python -m tests.cluster.fork_server PACKAGE...`.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import io
import itertools
import json
import os
import pkgutil
import resource
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests import ROOT

_LEFT_TO_THE_FORKED = ("wgpu", "published", "generator", "harness", "__main__")
"""Parts of names of modules that few import, open a device, or cost seconds."""
IMPORTED_LATER = {
    "launcher": ("tests.cluster.forked_rendering",),
    "launcher.inventory": (  # by each rendering
        "ansible.inventory.manager",
        "ansible.plugins.loader",
        "ansible.template",
        "ansible.vars.manager",
    ),
    "trainer": (
        "pandas",  # by pyarrow, with the first table
        "tensorboard.compat.proto.event_pb2",
        "tensorboard.summary.writer.record_writer",
        "wgpu.backends.wgpu_native",
    ),
}
"""What a package imports only when it is needed: by most processes, and for half a second."""
_NO_THREADS = {
    "OPENBLAS_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}
"""NumPy and pyarrow start threads as they are imported, and a fork has but one."""
_LINE = 1 << 20
_PATIENCE = 270.0
"""Seconds for the server to answer: on a busy host its imports alone take a minute."""


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
    """The program, which ends once all have left who use it.

    Args:
        packages: what it imports, with all their modules.
        meeting: where the processes of a test session meet: the first one starts the program.
        inside: the beginning of a command line that starts it elsewhere, as in a namespace.
    """

    def __init__(
        self, *packages: str, meeting: Path | None = None, inside: Sequence[str] = ()
    ) -> None:
        self._inside = inside
        self._process: subprocess.Popen[bytes] | None = None
        self.pid = 0
        """Its process, if it was started here."""
        if meeting is None:
            self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._spawn(theirs, packages)
        else:
            with meeting.with_suffix(".lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                self._socket = _connected(meeting) or self._meet(meeting, packages)
        self._requests = itertools.count()
        self._awaited = -1
        self._started: int | None = None
        self._ended: dict[int, int] = {}

    def start(
        self,
        argv: Sequence[str],
        folder: Path,
        environment: Mapping[str, str],
        streams: tuple[int, int, int],
        limits: Mapping[int, int] | None = None,
        patience: float = _PATIENCE,
    ) -> Forked:
        """Start `python -m MODULE ...` in a folder with a whole environment.

        Args:
            streams: descriptors of its stdin, stdout and stderr, which stay open here.
            limits: soft limits of resources, such as `{resource.RLIMIT_NOFILE: 256}`.
            patience: seconds for it to be there.

        Raises:
            TimeoutError: there is no answer; what is started in spite of that is killed.
        """
        self._awaited, self._started = next(self._requests), None
        request = {
            "number": self._awaited,
            "argv": argv,
            "folder": str(folder.absolute()),
            "environment": dict(environment),
            "limits": list((limits or {}).items()),
        }
        self._socket.settimeout(patience)
        socket.send_fds(self._socket, [json.dumps(request).encode()], streams)
        deadline = time.monotonic() + patience
        try:
            while self._started is None:
                self._read(deadline - time.monotonic())
        finally:
            self._awaited = -1
        return Forked(self, self._started)

    def returncode(self, pid: int, patience: float) -> int | None:
        """Return how a process ended; None if it did not within so many seconds."""
        deadline = time.monotonic() + patience
        while pid not in self._ended:
            try:
                self._read(deadline - time.monotonic())
            except (TimeoutError, BlockingIOError):
                return None
        return self._ended[pid]

    def close(self) -> None:
        """Close this connection; a server of one's own ends, and what it has forked continues."""
        self._socket.close()
        if self._process is not None:
            self._process.wait(_PATIENCE)

    def leave(self) -> None:
        """Close this connection to a server that others may use; it ends with the last one."""
        self._socket.close()
        if self._process is not None:
            self._process.returncode = 0  # init waits for it

    def _spawn(self, stdin: socket.socket, packages: Sequence[str]) -> None:
        with stdin:
            self._process = subprocess.Popen(
                [*self._inside, sys.executable, "-m", "tests.cluster.fork_server", *packages],
                cwd=ROOT,
                stdin=stdin.fileno(),
                stdout=subprocess.DEVNULL,
                env={**os.environ, **_NO_THREADS},
                start_new_session=True,
            )
        self.pid = self._process.pid

    def _meet(self, meeting: Path, packages: Sequence[str]) -> socket.socket:
        meeting.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(str(meeting))
        listener.listen()
        self._spawn(listener, packages)
        connected = _connected(meeting)
        assert connected is not None, "the fork server has ended; its stderr says why"
        return connected

    def _read(self, patience: float) -> None:
        self._socket.settimeout(max(patience, 0.0))
        line = self._socket.recv(_LINE)
        if not line:
            raise RuntimeError("the fork server has ended; its stderr says why")
        message = json.loads(line)
        if "ended" in message:
            self._ended[message["ended"]] = message["returncode"]
        elif message["number"] == self._awaited:
            self._started = message["pid"]
            self._ended.pop(message["pid"], None)  # the number is of an earlier process too
        else:  # nobody waits for it any more
            with contextlib.suppress(ProcessLookupError):
                os.kill(message["pid"], signal.SIGKILL)


def _connected(meeting: Path) -> socket.socket | None:
    """Return an accepted connection; None if no server listens, or it has stopped listening."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.settimeout(_PATIENCE)
    with contextlib.suppress(ConnectionError, FileNotFoundError):
        made.connect(str(meeting))
        if made.recv(_LINE):
            return made
    made.close()
    return None


def main() -> None:
    """Serve until all other ends are closed; returns in every forked process."""
    for package in map(importlib.import_module, sys.argv[1:]):
        for name in IMPORTED_LATER.get(package.__name__, ()):
            importlib.import_module(name)
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not any(part in module.name for part in _LEFT_TO_THE_FORKED):
                importlib.import_module(module.name)
    threads = len(list(Path("/proc/self/task").iterdir()))
    assert threads == 1, f"{threads} threads run after the imports"
    for finalizer in weakref.finalize._registry:  # pyright: ignore
        finalizer.atexit = False  # torch's, of each operator that it has defined: memory as well
    gc.collect()
    gc.freeze()  # a collection in a child would write to, and so copy, every page
    first = socket.socket(fileno=0)
    listens = bool(first.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    selector = selectors.DefaultSelector()
    selector.register(first, selectors.EVENT_READ)
    clients = set() if listens else {first}
    while True:
        for key, _ in selector.select():
            if isinstance(key.fileobj, int):
                selector.unregister(key.fileobj)
                os.close(key.fd)
                pid, client = key.data
                _, status = os.waitpid(pid, 0)
                _send(client, {"ended": pid, "returncode": os.waitstatus_to_exitcode(status)})
                continue
            client = key.fileobj
            assert isinstance(client, socket.socket)
            if listens and client is first:
                client = first.accept()[0]
                selector.register(client, selectors.EVENT_READ)
                clients.add(client)
                _send(client, {"accepted": True})
                continue
            try:
                line, streams, _, _ = socket.recv_fds(client, _LINE, 3)
            except ConnectionError:
                line, streams = b"", []
            if not line:
                selector.unregister(client)
                clients.remove(client)
                client.close()
                if not clients:
                    if listens:
                        _clear(Path(first.getsockname()))
                    sys.exit(0)
                continue
            request = json.loads(line)
            pid = os.fork()
            if pid == 0:
                selector.close()
                for each in {first, *clients}:
                    each.detach()
                _become(request, streams)
                return
            for stream in streams:
                os.close(stream)
            selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, client))
            _send(client, {"number": request["number"], "pid": pid})


def _clear(meeting: Path) -> None:
    """Remove what processes met at."""
    with contextlib.suppress(OSError):  # another package's is there still
        for file in (meeting, meeting.with_suffix(".lock")):
            file.unlink()
        meeting.parent.rmdir()


def _send(client: socket.socket, message: dict[str, object]) -> None:
    with contextlib.suppress(OSError):  # the client has closed its end, and reads no answer
        client.send(json.dumps(message).encode())


def _become(request: dict, streams: Sequence[int]) -> None:
    """Take on what a start from nothing would have given."""
    os.setsid()
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    os.closerange(3, 1 << 16)
    for kind, soft in request["limits"]:
        resource.setrlimit(kind, (soft, resource.getrlimit(kind)[1]))
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=sys.stdout.isatty())
    sys.argv = request["argv"]


def _run(module: str) -> None:
    """Run a module as `python -m` does, and leave the memory to the kernel.

    To clear a thousand modules takes a third of a second, and the destructors of torch's and
    Arrow's libraries a quarter: they write to, and so copy, 80 MB. All else of an end happens:
    threads are waited for, exit handlers run, streams are flushed. What `launch` or torchrun
    starts, and every command that a test starts by itself, ends in full.
    """
    sys.modules.pop(module, None)  # as after a start from nothing, it is run and not imported
    code: object = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code or 0
        if not isinstance(code, int):
            raise
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if not stream.closed:
            stream.flush()
    ctypes.CDLL(None).fflush(None)
    os._exit(code)


if __name__ == "__main__":
    main()
    assert sys.argv.pop(0) == "-m"
    _run(sys.argv[0])
