"""The faults themselves. Each is carried out in a thread of its own, and healed by it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from launcher.session.processes import ProcessIdentity, send_signal
from tests.soak.cluster import LINK_DELAY, SoakCluster
from tests.soak.schedule import COORDINATOR, WORKERS, Fault

SUPERVISOR_DELAY = 2.0
"""Seconds until a killed supervisor is started again: RestartSec of the recipe's units."""
_TURN = 0.1
"""Seconds of one turn of a stall: some of it the worker runs, the rest it is stopped."""
_BALLAST = "ballast"


class NothingThereError(Exception):
    """The process that a fault was to hit was not running: it is on its way back."""


@dataclass(frozen=True)
class Injection:
    """A fault that was carried out, or why it was not."""

    fault: Fault
    began: float
    """When it happened, seconds after the start."""
    healed: float
    """When it was over."""
    missed: str = ""
    """Why it did not happen; empty when it did."""


class Injector:
    """Carries faults out on a cluster; several may last at the same time."""

    def __init__(self, cluster: SoakCluster, now: Callable[[], float]) -> None:
        self._cluster = cluster
        self._now = now
        self._pool = ThreadPoolExecutor(16, thread_name_prefix="fault")
        self._begun: list[Future[Injection]] = []

    def begin(self, fault: Fault) -> None:
        """Carry a fault out beside the others."""
        self._begun.append(self._pool.submit(self._carry_out, fault))

    def finish(self) -> list[Injection]:
        """Wait until everything is healed and return what happened, in the order of time."""
        self._pool.shutdown(wait=True)
        return [future.result() for future in self._begun]

    def _carry_out(self, fault: Fault) -> Injection:
        began = self._now()
        try:
            HOW[fault.kind](self._cluster, fault)
        except NothingThereError as error:
            return Injection(fault, began, self._now(), str(error))
        return Injection(fault, began, self._now())


def _cut(cluster: SoakCluster, fault: Fault) -> None:
    cluster.proxies[fault.target].cut()


def _silence(cluster: SoakCluster, fault: Fault) -> None:
    proxy = cluster.proxies[fault.target]
    proxy.freeze()
    time.sleep(fault.seconds)
    proxy.thaw()


def _slow_link(cluster: SoakCluster, fault: Fault) -> None:
    proxy = cluster.proxies[fault.target]
    proxy.rate, proxy.delay = fault.amount, 5 * LINK_DELAY
    time.sleep(fault.seconds)
    proxy.rate, proxy.delay = 0.0, LINK_DELAY


def _stop(cluster: SoakCluster, fault: Fault) -> None:
    with _stopped(_child(cluster, fault.target)):
        time.sleep(fault.seconds)


def _stall(cluster: SoakCluster, fault: Fault) -> None:
    child = _child(cluster, fault.target)
    until = time.monotonic() + fault.seconds
    while time.monotonic() < until:
        with _stopped(child):
            time.sleep(_TURN * (1 - fault.amount))
        time.sleep(_TURN * fault.amount)


def _kill(cluster: SoakCluster, fault: Fault) -> None:
    if not send_signal(_child(cluster, fault.target), signal.SIGKILL):
        raise NothingThereError("it had just ended")


def _kill_supervisor(cluster: SoakCluster, fault: Fault) -> None:
    supervisor = cluster.pair(fault.target).supervisor
    if supervisor is None or not send_signal(supervisor, signal.SIGKILL):
        raise NothingThereError("no supervisor")
    time.sleep(SUPERVISOR_DELAY)
    cluster.restart_supervisor(fault.target)


def _full_disk(cluster: SoakCluster, fault: Fault) -> None:
    """Take every free byte, and again what is freed meanwhile."""
    ballast = cluster.disk / _BALLAST
    try:
        with ballast.open("ab") as stream:
            _take_all(stream.fileno())
            until = time.monotonic() + fault.seconds
            while time.monotonic() < until:
                time.sleep(0.02)
                _take_all(stream.fileno())
    finally:
        ballast.unlink(missing_ok=True)  # on a slow machine two may overlap


def _take_all(descriptor: int) -> None:
    for piece in (2**24, 2**12):
        with suppress(OSError):  # ENOSPC: no piece of this size is left
            while True:
                os.posix_fallocate(descriptor, os.fstat(descriptor).st_size, piece)


def _clock_jump(cluster: SoakCluster, fault: Fault) -> None:
    """Certificates are looked at when a connection is made, so it is made again."""
    assert cluster.clocks is not None
    cluster.clocks.set(fault.target, fault.amount)
    for name in WORKERS if fault.target == COORDINATOR else (fault.target,):
        cluster.proxies[name].cut()
    time.sleep(fault.seconds)
    cluster.clocks.set(fault.target, 0)


HOW: dict[str, Callable[[SoakCluster, Fault], None]] = {
    "cut": _cut,
    "silence": _silence,
    "slow link": _slow_link,
    "stop worker": _stop,
    "stop coordinator": _stop,
    "stall": _stall,
    "kill worker": _kill,
    "kill coordinator": _kill,
    "kill supervisor": _kill_supervisor,
    "full disk": _full_disk,
    "clock jump": _clock_jump,
}


def _child(cluster: SoakCluster, name: str) -> ProcessIdentity:
    child = cluster.pair(name).child
    if child is None:
        raise NothingThereError("not running")
    return child


@contextmanager
def _stopped(process: ProcessIdentity) -> Iterator[None]:
    send_signal(process, signal.SIGSTOP)
    try:
        yield
    finally:
        send_signal(process, signal.SIGCONT)
