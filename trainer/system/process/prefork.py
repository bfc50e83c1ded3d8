"""A process that imports once and forks a worker for each attempt of its supervisor.

The imports are most of a start, so a killed worker restarts at once. The fork is safe because
nothing but imports has happened: there is one thread, no device was opened, no random number was
drawn, and the environment, the folder and the command line are already the worker's.

The supervisor's side is `launcher/session/prefork.py`: $MOTLEY_PARENT is `PID:DESCRIPTOR` of
the supervisor and of a socket to it. For each attempt the descriptor of a log arrives, the worker's
pid is returned, and an answer lets it run. The worker is forked twice, so that the supervisor,
which adopts orphans, becomes its parent.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

from trainer.system.process.imports import uncollected

log = logging.getLogger(__name__)

FALLBACK_VARIABLE = "MOTLEY_GPU_FALLBACK"
"""Lets a process use another device than requested: set for a restarted one, whose device may have
been lost, and by the launcher for a device that it chose itself."""
_VARIABLE = "MOTLEY_PARENT"
_PR_SET_PDEATHSIG = 1


def fork_workers(load: Callable[[], None]) -> None:
    """Import by `load`, then fork a worker for each attempt; returns in every worker.

    Without a supervisor that asks for it, or if a fork would be unsafe (not on Linux, or with a
    second thread), it returns in this process, which then is the worker.
    """
    keeper, _, descriptor = os.environ.pop(_VARIABLE, "").partition(":")
    if sys.platform != "linux" or keeper != str(os.getppid()):
        return
    # OpenBLAS starts threads as NumPy is imported; a worker's products are torch's or the GPU's.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    with uncollected():  # a collection in a child would write to, and so copy, every page
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
            if _is_worker(requests, int(keeper), output):
                return
            os.close(output)
            os.environ[FALLBACK_VARIABLE] = "1"  # the next one is a restart


def _is_worker(requests: socket.socket, keeper: int, output: int) -> bool:
    """Fork a worker and return whether this is it."""
    pids, begin = os.pipe(), os.pipe()
    middle = os.fork()
    if middle == 0:
        worker = os.fork()
        if worker:
            os.setpgid(worker, worker)  # before its pid is known and the group is signalled
            os.write(pids[1], str(worker).encode())
            os._exit(0)
        _begin(begin, keeper, output)
        for end in pids:
            os.close(end)
        return True
    os.waitpid(middle, 0)
    # From here on the worker is the supervisor's, which records it before it runs.
    requests.send(os.read(pids[0], 64))
    if requests.recv(16):
        os.write(begin[1], b"!")
    for end in (*pids, *begin):
        os.close(end)
    return False


def _begin(begin: tuple[int, int], keeper: int, output: int) -> None:
    """Wait until this process is the supervisor's child, and die with it from then on."""
    os.close(begin[1])
    adopted = os.read(begin[0], 1)
    os.close(begin[0])
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if not adopted or os.getppid() != keeper:
        os._exit(1)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(output)
