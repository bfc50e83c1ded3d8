"""Queries a run and its devices in the background, so that a view never waits for a host."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from launcher.agent.operations import read_gauges
from launcher.hosts import fleet
from launcher.hosts.base import Connection
from launcher.inventory.facts.gauges import Gauge
from launcher.inventory.hosts import Host
from launcher.runs.failures import Failure, FailureWatch
from launcher.runs.status import RunMonitor, RunView

LOOK_EVERY = 1.0
GAUGES_EVERY = 2.0
_GAUGES_DEADLINE = 5.0
STALE = 10.0
"""Seconds after which a reading of a device is not shown any more."""
_KEPT_LOSSES = 600
_PACE_LOOKS = 60
_KEPT_FAILURES = 3

Gauges = Mapping[str, Mapping[str, Gauge]]


@dataclass(frozen=True)
class TelemetrySnapshot:
    """The known state at one moment."""

    view: RunView
    age: float
    """Seconds since the view was true."""
    gauges: Gauges = field(default_factory=dict[str, Mapping[str, Gauge]])
    """By host, then by device; only what is fresh."""
    losses: tuple[float, ...] = ()
    left: float | None = None
    """Seconds to the last step, at the pace of late; None while unknown."""
    failures: tuple[Failure, ...] = ()


class StepRate:
    """The recent rate of steps."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque(maxlen=_PACE_LOOKS)

    def update(self, view: RunView, now: float) -> None:
        """Take a look into account; only training counts for the pace."""
        step = (view.training or {}).get("step")
        if view.state != "running" or step is None:
            self._seen.clear()
        elif not self._seen or step > self._seen[-1][1]:
            self._seen.append((now, step))
        elif step < self._seen[-1][1]:  # it went on from a checkpoint
            self._seen.clear()

    def seconds_left(self, view: RunView) -> float | None:
        """Return the seconds to the last step; None while unknown."""
        total = (view.training or {}).get("total_steps")
        looks = tuple(self._seen)
        if len(looks) < 2 or total is None:
            return None
        (begin, first), (end, last) = looks[0], looks[-1]
        return max(0.0, (total - last) * (end - begin) / (last - first))


class HostGauges:
    """The devices of hosts, read in the background."""

    def __init__(self, hosts: Sequence[Host]) -> None:
        self._hosts = hosts
        self._read: dict[str, tuple[float, dict[str, Gauge]]] = {}
        self._closed = threading.Event()

    def start(self) -> None:
        """Begin; `close` ends it."""
        threading.Thread(target=self._read_on, daemon=True).start()

    def close(self) -> None:
        """Stop reading."""
        self._closed.set()

    def read_fresh(self) -> Gauges:
        """Return the readings that are not stale, by host."""
        now = time.monotonic()
        return {host: gauges for host, (at, gauges) in dict(self._read).items() if now - at < STALE}

    def _read_on(self) -> None:
        def read(host: Host, there: Connection) -> None:  # a late answer counts too
            gauges = there.ask(read_gauges.with_deadline(_GAUGES_DEADLINE))
            self._read[host.name] = (time.monotonic(), gauges)

        while not self._closed.is_set():
            fleet.ask_hosts(self._hosts, read)  # `observe` lists unreachable hosts
            self._closed.wait(GAUGES_EVERY)


class Telemetry:
    """Observes one run until it is closed."""

    def __init__(self, monitor: RunMonitor) -> None:
        self._monitor = monitor
        self._gauges = HostGauges(monitor.run.hosts)
        self._watch = FailureWatch(monitor)
        self._view: RunView | None = None
        self._seen = 0.0
        self._error: BaseException | None = None
        self._losses: deque[float] = deque(maxlen=_KEPT_LOSSES)
        self._step: object = None
        self._pace = StepRate()
        self._failures: deque[Failure] = deque(maxlen=_KEPT_FAILURES)
        self._first = threading.Event()
        self._closed = threading.Event()

    def start(self) -> None:
        """Begin; returns once there has been a first look.

        Raises:
            LauncherError: the first look failed.
        """
        threading.Thread(target=self._observe_run, daemon=True).start()
        self._gauges.start()
        self._first.wait()
        self.get_snapshot()

    def close(self) -> None:
        """Stop looking."""
        self._closed.set()
        self._gauges.close()

    def get_snapshot(self) -> TelemetrySnapshot:
        """Return the latest known state, without waiting for a host.

        Raises:
            LauncherError: looking has come to an end for a reason.
        """
        if self._error is not None:
            raise self._error
        assert self._view is not None
        return TelemetrySnapshot(
            self._view,
            time.monotonic() - self._seen,
            self._gauges.read_fresh(),
            tuple(self._losses),
            self._pace.seconds_left(self._view),
            tuple(self._failures),
        )

    def _observe_run(self) -> None:
        try:
            while not self._closed.is_set():
                view = self._monitor.observe()
                self._store_view(view)
                self._pace.update(view, time.monotonic())
                self._failures.extend(self._watch.new_failures(view))
                self._view, self._seen = view, time.monotonic()
                self._first.set()
                self._closed.wait(LOOK_EVERY)
        except BaseException as error:  # raised again by `latest`
            self._error = error
            self._first.set()
            self._gauges.close()

    def _store_view(self, view: RunView) -> None:
        training: Mapping[str, Any] = view.training or {}
        step, loss = training.get("step"), training.get("loss")
        if step != self._step and loss is not None:
            self._step = step
            self._losses.append(float(loss))
