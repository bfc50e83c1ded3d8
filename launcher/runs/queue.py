"""Run what waits in a queue, one job after another.

One process does so, where the SSH keys and the cluster's CA are. It may be killed at any moment:
what it has written says what the next one does. A job is never started twice: `up` writes the plan
on every host before it starts the first process, so without a plan on the coordinator's host
nothing has run.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

from launcher.errors import (
    BusyError,
    InterruptedStartError,
    JobFailedError,
    LauncherError,
    OverBudgetError,
    UnreachableError,
)
from launcher.hosts.fleet import REACH
from launcher.plan.configuration import JobRequest
from launcher.runs.cluster import Cluster
from launcher.runs.down import tear_down
from launcher.runs.records.queue_records import Queue, QueuedJob, QueueEntry
from launcher.runs.records.registry import Registry, new_run_id, operator_name
from launcher.runs.records.run import Run
from launcher.runs.records.stored_configs import is_own_entry, store_entry
from launcher.runs.status import OVER, RunMonitor, RunView, live_runs
from launcher.terminal import note
from trainer.system.regular_file import read_text

LOOK_AGAIN = 5.0
"""Seconds between two looks at a queue that waits for a job, or for the end of another run."""
LONGEST_PAUSE = 300.0
"""Seconds between two attempts to reach a host, at most."""

_CUT_OFF = "interrupted start"

Follow = Callable[[Run, Callable[[str], None]], RunView]


def open_queue(inventory: Path | None) -> tuple[Queue, Registry]:
    """Return the queue of an inventory, whatever hosts a job is limited to, and its registry.

    Raises:
        ConfigError: the inventory cannot be used.
        UnreachableError: the coordinator's host does not answer.
    """
    registry = Cluster(inventory).registry
    return Queue(registry.open_state_folder()), registry


def check_inputs(cluster: Cluster, order: JobRequest, report: Callable[[str], None] = note) -> None:
    """Check a job's model and data on the hosts as its start will, if they are the user's.

    Hosts that do not answer now may do so when the job's turn comes.

    Raises:
        PreflightError: the start would refuse them.
        ConfigError: the job cannot be used.
    """
    if not order.brings_inputs:
        return
    try:
        start = Cluster(cluster.inventory, cluster.start, report=lambda _line: None)
        start.plan_launch(order, None, only_to_plan=True)
    except UnreachableError as error:
        report(f"model and data are checked when the job starts: {error}")


def enqueue_job(cluster: Cluster, order: JobRequest, timeout: float | None) -> str:
    """Add a job to the queue of a cluster, and return the id of its run.

    Raises:
        ConfigError: the job cannot be used, or the queue cannot be written.
        UnreachableError: the coordinator's host does not answer.
    """
    run_id = new_run_id(order.resolve_job(cluster.hosts).name)
    queue, registry = open_queue(cluster.inventory)
    anchored = order.anchor_paths(cluster.hosts)
    job = QueuedJob(
        leader=order.leader,
        preset=None if order.is_file else order.source,
        config=read_text(Path(str(order.source))) if order.is_file else None,
        settings=dict(order.settings),
        folder=str(anchored.folder),
        start=cluster.start.without_secrets,
        timeout=timeout,
        added_by=operator_name(),
        added_at=queue.read_clock(),
    )
    data = json.dumps(asdict(job), indent=1).encode()
    if not registry.is_local:
        store_entry(run_id, data)
    queue.add(run_id, data)
    return run_id


class QueueRunner:
    """Runs the jobs of a queue on the hosts of this machine's inventory."""

    def __init__(
        self,
        inventory: Path | None,
        follow: Follow,
        report: Callable[[str], None] = note,
        notify: Sequence[str] = (),
    ) -> None:
        """Take what follows a run to its end, as `views.follow.follow_run` does, and the command
        for the notifications of the runs that this process starts.
        """
        self._notify = tuple(notify)
        self._inventory = inventory
        self._follow = follow
        self._report = report
        self._reported_lines: set[str] = set()

    def run_forever(self) -> NoReturn:
        """Run jobs until this process is ended, which leaves a run that has begun alone.

        Raises:
            PreflightError: another process works on this queue.
            ConfigError: the inventory cannot be used, or the queue cannot be written.
        """
        pause = LOOK_AGAIN
        while True:
            try:
                queue, registry = open_queue(self._inventory)
                with queue.lock():
                    while True:
                        if not self.run_next_job(queue, registry):
                            time.sleep(LOOK_AGAIN)
                        pause = LOOK_AGAIN
            except UnreachableError as error:
                self._report_once(str(error))
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)

    def run_next_job(self, queue: Queue, registry: Registry) -> bool:
        """Take the oldest job that is not over to its end; False: there is none, or it waits.

        Raises:
            UnreachableError: a host does not answer; the job is kept for another attempt.
            InterruptedStartError: a signal came during a start, which was undone.
            ConfigError: the queue cannot be written.
        """
        left = [entry for entry in queue.read_entries()[0] if entry.end is None]
        entry = next((entry for entry in left if self._is_trusted(entry, registry)), None)
        if entry is None:
            self._report_once("the queue is empty; add a job: launch queue add")
            return False
        interruption: InterruptedStartError | None = None
        try:
            end = self._run_entry(queue, registry, entry)
        except UnreachableError:
            raise
        except BusyError as error:  # another start was faster; nothing of this one has begun
            queue.release(entry.id)
            self._report_once(str(error))
            return False
        except LauncherError as error:
            stopped = isinstance(error, InterruptedStartError)
            end = ("stopped" if stopped else "failed", str(error), error.exit_code)
            if stopped and isinstance(error.__context__, KeyboardInterrupt):  # not by `down`
                interruption = error
        if end is None:
            return False
        queue.finish(entry.id, *end)
        self._report(f"{entry.id}: {end[0]}{f': {end[1]}' if end[1] else ''}")
        self._reported_lines.clear()
        if interruption is not None:
            raise interruption
        return True

    def _run_entry(
        self, queue: Queue, registry: Registry, entry: QueueEntry
    ) -> tuple[str, str | None, int] | None:
        """Start a job, or take up its run, and return state, reason and exit code at its end.

        None: it waits for another run, or was removed.
        """
        cluster = Cluster(self._inventory, entry.job.start, self._report)
        place = cluster.registry.open_state_folder()
        if entry.claimed and place.connection.exists(place.plan_path(entry.id)):
            run = cluster.registry.get_run(entry.id)
            view = RunMonitor(run).observe(REACH)
            leader = view.processes[run.plan.leader.name]
            if leader.state == "unreachable":
                raise UnreachableError(
                    leader.message or f"host {run.leader_host.name} does not answer"
                )
            if leader.state == "absent" and view.end is None:
                tear_down(run, why=_CUT_OFF)
                return "failed", _CUT_OFF, InterruptedStartError.exit_code
        else:
            active = [view for view in live_runs(registry) if view.state not in OVER]
            if active:
                self._report_once(f"{entry.id} waits for the end of run {active[0].run.run_id}")
                return None
            with entry.job.open_request() as order:
                launch = cluster.plan_launch(order, None, only_to_plan=False, run_id=entry.id)
            if not queue.claim(entry.id):
                return None
            run = cluster.start_run(launch, entry.job.timeout, self._notify)
        try:
            view = self._follow(run, self._report)
        except (JobFailedError, OverBudgetError) as error:
            state = RunMonitor(run).observe().state
            return state if state in OVER else "failed", str(error), error.exit_code
        return view.state, None, 0

    def _is_trusted(self, entry: QueueEntry, registry: Registry) -> bool:
        """Whether this machine added a job, or keeps the queue itself.

        A config names files and settings of hosts, and units can write what lies in a
        host's state folder: as for `--resume`, another host's word is not enough.
        """
        if registry.is_local or is_own_entry(entry.id, entry.data):
            return True
        self._report_once(
            f"{entry.id} skipped: it was queued on {entry.job.added_by};"
            " run `launch queue run` there"
        )
        return False

    def _report_once(self, line: str) -> None:
        """Report a line, once until the next job is over."""
        if line not in self._reported_lines:
            self._reported_lines.add(line)
            self._report(line)
