"""State of the page: one object for the overview, one for a run, from what `status` reads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from launcher.errors import ConfigError, LauncherError
from launcher.hosts.fleet import LOOK
from launcher.runs.budget.spending import read_spend, sum_spend
from launcher.runs.cluster import Cluster
from launcher.runs.output_run import OutputMonitor
from launcher.runs.records.registry import Registry
from launcher.runs.status import RunMonitor, RunView, live_runs
from launcher.views.dashboard.distillation import Distillation
from launcher.views.dashboard.history import History
from launcher.views.dashboard.logs import LogQuery, log_lines
from launcher.views.render import status_tree
from launcher.views.telemetry import (
    LOOK_EVERY,
    STALE,
    Gauges,
    HostGauges,
    Telemetry,
    TelemetrySnapshot,
)
from trainer.system.errors import plain_reason

UNWATCHED = 90.0
"""Seconds after the last reader at which hosts are not queried any more; Prometheus reads about
once a minute, and finds devices that have been read meanwhile."""
_OVERVIEW_EVERY = 5.0
_SPEND_EVERY = 60.0
"""Seconds between looks at the ledgers, which are read whole."""
_LONGEST = 400

Tree = dict[str, Any]


class LiveTree:
    """An object kept current by a thread for as long as someone reads it."""

    def __init__(
        self,
        look: Callable[[], Tree],
        every: float,
        close: Callable[[], None],
        history: History | None = None,
    ) -> None:
        self.history = history
        self._look = look
        self._every = every
        self._close = close
        self._tree: Tree = {}
        self._read_at = time.monotonic()
        self._first = threading.Event()
        self._defect: BaseException | None = None
        self.closed = threading.Event()
        threading.Thread(target=self._keep_current, daemon=True).start()

    def latest_tree(self) -> Tree:
        """Return the latest object; waits for the first one alone."""
        self._read_at = time.monotonic()
        self._first.wait()
        if self._defect is not None:
            raise self._defect
        return self._tree

    def _keep_current(self) -> None:
        try:
            while time.monotonic() - self._read_at < UNWATCHED:
                try:
                    self._tree = self._look()
                except (LauncherError, OSError) as error:  # tried again: a host may come back
                    self._tree = {**self._tree, "error": plain_reason(error)[:_LONGEST]}
                self._first.set()
                time.sleep(self._every)
        except BaseException as error:  # raised again by `tree`
            self._defect = error
        finally:
            self.closed.set()
            self._first.set()
            self._close()


class ObservedCluster:
    """A cluster's runs and hosts, queried while a page is open; nothing is written or locked.

    Args:
        outputs: runs that no launcher started, shown beside the cluster's.
    """

    def __init__(self, cluster: Cluster, outputs: Sequence[OutputMonitor] = ()) -> None:
        self._cluster = cluster
        self._outputs = {monitor.run.run_id: monitor for monitor in outputs}
        self._ended: dict[str, RunView] = {}
        self._live: dict[str, LiveTree] = {}
        self._spend: list[Tree] = []
        self._spend_read = -_SPEND_EVERY
        self._lock = threading.Lock()

    def get_overview(self) -> Tree:
        """Return the runs, the hosts, what is idle, and what was spent."""

        def start_observing() -> LiveTree:
            gauges, began = HostGauges(self._cluster.hosts), time.monotonic()
            gauges.start()

            def build_tree() -> Tree:
                return self._build_overview(gauges.read_fresh(), time.monotonic() - began > STALE)

            return LiveTree(build_tree, _OVERVIEW_EVERY, gauges.close)

        return self._get_live("", start_observing).latest_tree()

    def get_run(self, run_id: str) -> tuple[Tree, History]:
        """Return a run's state, and its history.

        Raises:
            ConfigError: there is no such run.
        """

        def start_observing() -> LiveTree:
            monitor = self._outputs.get(run_id) or RunMonitor(
                self._cluster.peek_registry().get_run(run_id)
            )
            run = monitor.run
            telemetry, history = Telemetry(monitor), History(run)
            taught = Distillation(run) if run.plan.leader.role == "student" else None
            telemetry.start()

            def build_tree() -> Tree:
                tree = run_tree(telemetry.get_snapshot())
                try:
                    with suppress(FileNotFoundError):  # no step yet
                        history.read_on()
                    if taught is not None:
                        taught.read_on(last_checkpoint(tree["status"]["training"]))
                except (LauncherError, OSError, ValueError) as error:
                    tree["error"] = plain_reason(error)[:_LONGEST]
                if taught is not None:
                    tree["distillation"] = taught.build_tree(*history.position)
                return tree

            return LiveTree(build_tree, LOOK_EVERY, telemetry.close, history)

        live = self._get_live(run_id, start_observing)
        assert live.history is not None
        return live.latest_tree(), live.history

    def get_log(self, run_id: str, process: str, wanted: LogQuery) -> Tree:
        """Return lines of a process's log; see `log_lines`."""
        _, history = self.get_run(run_id)
        return log_lines(RunMonitor(history.run), process, wanted)

    def _get_live(self, name: str, begin: Callable[[], LiveTree]) -> LiveTree:
        with self._lock:
            self._live = {key: one for key, one in self._live.items() if not one.closed.is_set()}
            if name not in self._live:
                self._live[name] = begin()
            return self._live[name]

    def _build_overview(self, gauges: Gauges, complete: bool) -> Tree:
        """Return the overview; once `complete`, a host without a reading does not answer."""
        registry = self._cluster.peek_registry()
        remarks: list[str] = [] if registry.absence is None else [str(registry.absence)]
        live = {view.run.run_id: view for view in live_runs(registry)}
        for run_id in live:  # one that was resumed is looked at again when it ends
            self._ended.pop(run_id, None)
        known = registry.list_run_ids()
        for run in registry.read_runs(known - self._ended.keys() - live.keys()):
            view = RunMonitor(run).observe(LOOK)
            (live if view.is_live or view.unreachable else self._ended)[run.run_id] = view
        both = {**self._ended, **live}
        views = sorted((both[name] for name in known & both.keys()), key=lambda v: v.run.started)
        latest = next((view for view in views if view.is_live), views[-1] if views else None)
        for monitor in self._outputs.values():
            try:
                views.append(monitor.observe())
            except (ConfigError, OSError) as error:  # the others are shown
                remarks.append(plain_reason(error))
        self._look_at_spend(registry, remarks)
        for view in views:
            remarks += [line for line in view.unreachable.values() if line not in remarks]
        return {
            "schema": "motley.dashboard/2",
            "now": time.time(),
            "runs": [_run_line(view) for view in reversed(views)],
            "hosts": self._host_entries([view for view in views if view.is_live], gauges, complete),
            "idle": [asdict(host) for host in self._cluster.find_idle_hosts(latest)],
            "spend": self._spend,
            "remarks": [line[:_LONGEST] for line in remarks],
        }

    def _look_at_spend(self, registry: Registry, remarks: list[str]) -> None:
        if time.monotonic() - self._spend_read < _SPEND_EVERY:
            return
        try:
            found = sum_spend(read_spend(registry, remarks.append), "run")
            self._spend = [asdict(total) for total in found]
            self._spend_read = time.monotonic()
        except LauncherError as error:
            remarks.append(str(error))

    def _host_entries(self, live: list[RunView], gauges: Gauges, complete: bool) -> list[Tree]:
        names = {host.name: host for host in self._cluster.hosts}
        for view in live:
            names |= {host.name: host for host in view.run.hosts if host.name not in names}
        found: list[Tree] = []
        for name, host in names.items():
            busy = [
                f"{view.run.run_id}/{process.name}"
                for view in live
                for process in view.run.plan.processes
                if process.host == name and not view.processes[process.name].is_over
            ]
            devices = [
                {"name": d.name, "id": d.id, "backend": d.backend} for d in host.devices or ()
            ]
            silent = complete and name not in gauges
            reachable = not silent and not any(name in view.unreachable for view in live)
            found.append(
                {"name": name, "devices": devices, "busy": busy, "reachable": reachable}
                | {"gauges": _gauge_entries(gauges.get(name, {})), "rates": dict(host.link_rates)}
            )
        return found


def run_tree(snapshot: TelemetrySnapshot) -> Tree:
    """Return the state of a run: `status --json`, its devices' readings, and its failures."""
    status = status_tree(snapshot.view)
    names: dict[str, str | None] = {}
    for process in snapshot.view.run.plan.processes:
        with suppress(StopIteration):
            host = snapshot.view.run.find_host(process.host)
            first = next(iter(process.devices), "cpu")
            names[process.name] = next(
                d.name for d in host.devices or () if d.answers_to(first) and d.name
            )
    return {
        "schema": "motley.dashboard.run/2",
        "now": time.time(),
        "status": status,
        "launched": snapshot.view.run.is_launched,
        "outcome": snapshot.view.outcome[:_LONGEST],
        "device_names": names,
        "devices": {
            p.name: next(iter(p.devices), "cpu").lower() for p in snapshot.view.run.plan.processes
        },
        "gauges": {host: _gauge_entries(read) for host, read in snapshot.gauges.items()},
        "seconds_left": snapshot.left,
        "age": round(snapshot.age),
        "remarks": snapshot.view.remarks,
        "failures": [[line[:_LONGEST] for line in f.lines[:12]] for f in snapshot.failures],
        "summary": snapshot.view.result_lines,
    }


def _count_workers(view: RunView) -> tuple[int, int]:
    """Return the workers of a run and how many take part; a run without a plan reports them."""
    if planned := view.run.plan.workers or view.run.plan.followers:
        return len(planned), len(view.joined_ranks)
    training: Mapping[str, Any] = view.training or {}
    expected = training.get("expect_workers") or 0
    return expected, len(training.get("workers") or ()) or expected


def _run_line(view: RunView) -> Tree:
    training: Mapping[str, Any] = view.training or {}
    workers, joined = _count_workers(view)
    keys = ("step", "total_steps", "loss", "tokens_per_second", "unit", "updated", "budget")
    return {
        "run_id": view.run.run_id,
        "state": view.state,
        "outcome": view.outcome[:_LONGEST],
        "live": view.is_live,
        "started": view.run.started,
        "workers": workers,
        "joined": joined,
        "output": view.run.plan.output,
        **{key: training.get(key) for key in keys},
        "validation": training.get("validation"),
    }


def last_checkpoint(training: Mapping[str, Any] | None) -> str:
    """Return the folder of a run's last checkpoint, as it reports it; empty if there is none."""
    match training:
        case {"checkpoint": {"path": str(path)}}:
            return path
        case _:
            return ""


def _gauge_entries(gauges: Mapping[str, Any]) -> dict[str, Tree]:
    return {device.lower(): asdict(gauge) for device, gauge in gauges.items()}
