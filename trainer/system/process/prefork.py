"""A process that imports once and forks a worker for each attempt of its supervisor.

The imports are most of a start, so a killed worker restarts at once. The fork is safe because
nothing but imports has happened: there is one thread, no device was opened, no random number was
drawn, and the environment, the folder and the command line are already the worker's.

The supervisor's side is `launcher/session/prefork.py`. For each attempt the descriptor of a log
arrives, the worker's pid is returned, and an answer lets it run. The worker is forked twice, so
that the supervisor, which adopts orphans, becomes its parent.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from trainer.system.process.child import FALLBACK_VARIABLE, PARENT_VARIABLE, die_with_parent
from trainer.system.process.imports import pause_gc

log = logging.getLogger(__name__)


def fork_workers(load: Callable[[], None]) -> None:
    """Import by `load`, then fork a worker for each attempt; returns in every worker.

    Without a supervisor that asks for it, or if a fork would be unsafe (not on Linux, or with a
    second thread), it returns in this process, which then is the worker.
    """
    supervisor, _, descriptor = os.environ.pop(PARENT_VARIABLE, "").partition(":")
    if sys.platform != "linux" or supervisor != str(os.getppid()):
        return
    # OpenBLAS starts threads as NumPy is imported; a worker's products are torch's or the GPU's.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    with pause_gc():  # a collection in a child would write to, and so copy, every page
        load()
    if (threads := sum(1 for _ in Path("/proc/self/task").iterdir())) > 1:
        log.info("%d threads run after the imports: each attempt starts a new interpreter", threads)
        return
    with socket.socket(fileno=int(descriptor)) as requests:
        requests.set_inheritable(False)
        while True:
            request, descriptors, _, _ = socket.recv_fds(requests, 16, 1)
            if not request:
                sys.exit(0)  # the supervisor needs no more workers
            (output,) = descriptors
            if _is_worker(requests, int(supervisor), output):
                return
            os.close(output)
            os.environ[FALLBACK_VARIABLE] = "1"  # the next one is a restart


def _is_worker(requests: socket.socket, supervisor: int, output: int) -> bool:
    """Fork a worker and return whether this is it."""
    waits, begins = os.pipe()
    middle = os.fork()
    if middle == 0:
        worker = os.fork()
        if worker:
            os.setpgid(worker, worker)  # before its pid is known and the group is signalled
            with suppress(OSError):  # the supervisor has ended, and its children end too
                requests.send(str(worker).encode())
                os.kill(supervisor, signal.SIGCHLD)  # it looks for the pid
            os._exit(0)
        os.close(begins)
        _wait_until_adopted(waits, supervisor, output)
        return True
    os.waitpid(middle, 0)
    # From here on the worker is the supervisor's, which records it before it runs.
    if requests.recv(16):
        os.write(begins, b"!")
    os.close(waits)
    os.close(begins)
    return False


def _wait_until_adopted(waits: int, supervisor: int, output: int) -> None:
    """Wait until this process is the supervisor's child, and die with it from then on."""
    if not os.read(waits, 1):
        os._exit(1)
    os.close(waits)
    die_with_parent(supervisor)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(output)
