"""Start a run: plan, preflight, certificates, processes, then wait until all have joined.

If any step fails, nothing is left running.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from launcher.agent.checks.finding import Result
from launcher.agent.operations import list_wanted_runs
from launcher.errors import (
    BusyError,
    InterruptedStartError,
    PartialError,
    PreflightError,
    raise_all,
)
from launcher.files import default_state_folder
from launcher.hosts import fleet
from launcher.hosts.base import Connection
from launcher.hosts.fleet import REACH
from launcher.hosts.survey import Survey, survey_connections
from launcher.inventory.hosts import Host
from launcher.plan.distillation import place_distillation
from launcher.plan.placement import place_run
from launcher.plan.plan import LaunchPlan, ProcessPlan
from launcher.plan.plan_context import SCRIPT_FILE, PlanContext
from launcher.runs.down import defer_signals, tear_down
from launcher.runs.join import Report, wait_until_joined
from launcher.runs.preflight.inspection import inspect_hosts
from launcher.runs.processes.systemd import open_supervisor
from launcher.runs.records.registry import Registry, authority_folder, new_run_id
from launcher.runs.records.run import Run, StateFolder
from launcher.runs.records.stored_configs import StartArguments, store_config
from launcher.runs.status import OVER, live_runs
from launcher.runs.stopwatch import Stopwatch
from launcher.session.spec import RestartPolicy
from trainer.config.distill_job import DistillJob
from trainer.config.run import RunConfig
from trainer.config.script import Script
from trainer.system.untrusted_data import validate_json

if TYPE_CHECKING:
    from launcher.runs.certificates.authority import Credentials

JOIN_MARGIN = 60.0
"""Seconds on top of the exchange's join deadline: imports, model load, data."""

START_DEADLINE = 60.0
"""Seconds until the supervisors of all hosts have to show a sign of life."""

HEALTHY_MARGIN = 600.0
"""Seconds on top of the join deadline that a process has to live before its earlier failures are
forgotten: with 20 failures in a row a worker without a coordinator ends after about an hour."""

FETCH_MARGIN = 7200.0
"""Seconds on top of that when a model has to be downloaded; a process that fails ends the wait."""


@dataclass(frozen=True)
class Launch:
    """A planned start; nothing has been changed yet."""

    plan: LaunchPlan
    job: RunConfig | DistillJob
    found: Survey
    script: Script | None = None


def survey_hosts(hosts: Sequence[Host], only_to_plan: bool = False) -> Survey:
    """Query the hosts for what the inventory does not set; a dry run queries only if necessary.

    Raises:
        UnreachableError: hosts that have to be asked do not answer; every one is named.
    """
    asked = [h for h in hosts if h.is_local or h.devices is None or not only_to_plan]
    connections = fleet.ask_hosts(asked, lambda _, connection: connection, REACH).require()
    found = survey_connections(hosts, connections)
    raise_all([*found.failures.values()])
    return found


def make_plan(
    found: Survey,
    job: RunConfig | DistillJob,
    expect_workers: int | None,
    run_id: str | None = None,
    script: Script | None = None,
) -> LaunchPlan:
    """Return where everything would run, under a new run id or a given one; changes nothing.

    `expect_workers` is of a fine-tune; a distillation's job sets its number of teachers.
    """
    program = Path(sys.executable).with_name("trainer")
    command = (str(program),) if program.exists() else (sys.executable, "-P", "-m", "trainer.cli")
    setting = PlanContext(
        run_id=run_id or new_run_id(job.name),
        trainer_command=command,
        state_folder=str(default_state_folder()),
        routes=found.sources,
        no_route=found.no_route,
        identities=found.identities,
        script_digest=script.digest if script else "",
    )
    if isinstance(job, DistillJob):
        return place_distillation(found.hosts, job, setting)
    return place_run(found.hosts, job, expect_workers, setting)


def bring_up(
    launch: Launch,
    start: StartArguments,
    registry: Registry,
    report: Report,
    timeout: float | None,
    watch: Stopwatch,
    notify: Sequence[str] = (),
) -> Run:
    """Start a run and return it once every process takes part and training has begun.

    Args:
        notify: the operator's command for notifications, which goes to the leader's supervisor.

    Raises:
        UnreachableError: hosts do not answer; every one is named.
        PreflightError: a check failed, or the cluster is busy (BusyError); nothing was started.
        PartialError: processes are missing; names them with their last log lines.
        JobFailedError: the leader failed.
        InterruptedStartError: a signal came; whatever was started is stopped again.
    """
    plan, job = launch.plan, launch.job
    patience = job.start_deadline if isinstance(job, DistillJob) else job.exchange.join_deadline
    run, record = registry.record_run(plan)
    begun = False
    with _signals_interrupt():
        try:
            with registry.lock(f"run {plan.run_id}"):
                _refuse_if_busy(registry, report)
                checks = inspect_hosts(launch.found, plan, job, script=launch.script)
                refuse_failures(checks, report)
                watch.end_lap("preflight")
                begun = True
                config = job.to_yaml().encode()
                store_config(run.run_id, config, start)
                deliver_run(run, record, config, launch.script)
                watch.end_lap("certificates and files")
                _start_supervisors(run, patience, notify)
                watch.end_lap("start")
            # From here on the run itself keeps others out: a link that breaks costs no lock.
            report(f"started {run.run_id}: {_format_placement(plan)}")
            fetched = any(c.name == "model" and c.status == "warn" for c in checks)
            margin = JOIN_MARGIN + (FETCH_MARGIN if fetched else 0.0)
            wait_until_joined(run, timeout or patience + margin, report)
            watch.end_lap("join")
        except BaseException as error:
            if begun:
                with defer_signals():
                    ending = tear_down(run, grace=5.0, why=_failure_reason(error))
                for line in ending.left.values():
                    report(f"not undone: {line}")
            if begun and isinstance(error, KeyboardInterrupt):
                raise InterruptedStartError(
                    f"interrupted; run {run.run_id} was stopped before it started"
                ) from None
            raise
    return run


def _failure_reason(error: BaseException) -> str:
    """Return why a start failed; empty if it was interrupted."""
    stopped = isinstance(error, KeyboardInterrupt | InterruptedStartError)
    return "" if stopped else str(error) or type(error).__name__


def refuse_failures(checks: Sequence[Result], report: Report) -> None:
    """Raise PreflightError when a check failed: the first in its line, the rest as details.

    Warnings are reported.
    """
    failed = [check.line for check in checks if check.status == "fail"]
    if failed:
        raise PreflightError(failed[0], failed[1:])
    for check in checks:
        if check.status == "warn":
            report(check.line)


def _refuse_if_busy(registry: Registry, report: Report) -> None:
    for view in live_runs(registry, surely=True):
        if view.state in OVER:
            report(f"stopping the rest of run {view.run.run_id} ({view.state})")
            tear_down(view.run)
            continue
        raise BusyError(
            f"the cluster is busy: run {view.run.run_id} is {view.state}; "
            "see: launch status, stop it: launch cluster down"
        )

    def read_live_runs(place: StateFolder) -> list[str]:
        if not place.connection.units:
            return []
        return place.connection.ask(list_wanted_runs)

    # Runs that ended by themselves: their units need not be started at boot any more.
    ids = registry.ask_hosts(read_live_runs, REACH).require().values()
    for run in registry.read_runs({run_id for found in ids for run_id in found}):
        tear_down(run)


def _format_placement(plan: LaunchPlan) -> str:
    if plan.leader.role == "worker":
        return f"a ring of {len(plan.workers)} workers, rank 0 on {plan.leader.address}"
    if plan.workers:
        noun = "worker" if len(plan.workers) == 1 else "workers"
        return f"coordinator on {plan.leader.address}, {len(plan.workers)} {noun}"
    return ", ".join(f"{process.name} on {process.host}" for process in plan.processes)


def deliver_run(run: Run, record: bytes, config: bytes, script: Script | None = None) -> None:
    """Write what a run consists of on all that keep it; `record` is the plan.json, and comes last.

    The digest of a script is in the commands of its processes.

    Raises:
        PreflightError: a host does not take a file; nothing was started.
        UnreachableError: a host does not answer any more.
    """
    named = [process for process in run.plan.processes if process.certificate_names]
    leafs = _issue_certificates(run.run_id, named)

    def write_records(host: Host, connection: Connection) -> None:
        folder = run.run_folder(host, connection)
        connection.remove_file(
            run.stop_mark(host, connection)
        )  # of an earlier life of a resumed run
        if host.name == run.leader_host.name:
            for place in run.plan.leader.writable_folders.values():
                _clear_earlier_end(connection, f"{place}/status.json")
        connection.write(f"{folder}/run.yaml", config)
        if script:
            connection.write(f"{folder}/{SCRIPT_FILE}", script.content)
        for process in run.plan.processes:
            if process.host == host.name and process.name in leafs:
                for name, content in leafs[process.name].contents_by_name().items():
                    connection.write(f"{process.folder}/tls/{name}", content)
        connection.write(f"{folder}/plan.json", record)

    fleet.ask_hosts(run.file_hosts, write_records, REACH).require()


def _clear_earlier_end(connection: Connection, status: str) -> None:
    """Remove the end of an earlier attempt from a status: it would end every worker at once."""
    with contextlib.suppress(OSError, ValueError):
        tree = validate_json(dict[str, Any], connection.read(status), status, lines=True)
        connection.write(status, json.dumps({**tree, "state": "waiting"}).encode())


def _issue_certificates(run_id: str, processes: Sequence[ProcessPlan]) -> dict[str, Credentials]:
    """Return fresh certificates for processes that open or accept connections."""
    if not processes:
        return {}
    from launcher.runs.certificates.authority import (
        Authority,
        certificate_identity,
    )  # with cryptography

    authority = Authority.open(authority_folder())
    return {
        p.name: authority.issue(certificate_identity(run_id, p.rank), p.certificate_names)
        for p in processes
    }


def _start_supervisors(run: Run, join_deadline: float, notify: Sequence[str]) -> None:
    """Start the supervisors of all hosts at once; each looks after its process from then on."""
    # A worker gives up on an absent coordinator after the deadline: that counts as a
    # failure, so its supervisor finally gives up as well, without the launcher.
    restart = RestartPolicy(healthy_after=join_deadline + HEALTHY_MARGIN)
    leader = run.plan.leader

    def start_on_host(host: Host, connection: Connection) -> None:
        supervisor = open_supervisor(
            connection, run.run_id, restart, run.run_folder(host, connection)
        )
        for process in run.plan.processes:
            if process.host == host.name:
                # An evaluator is not done when its student is: the last checkpoints are left.
                serves = process.host == leader.host and process.role in ("worker", "teacher")
                if process is leader:
                    supervisor.start_process(process, notify=notify)
                else:
                    supervisor.start_process(process, leader if serves else None)

    fleet.ask_hosts(run.hosts, start_on_host, START_DEADLINE).require(PartialError)


@contextlib.contextmanager
def _signals_interrupt() -> Generator[None]:
    """Make SIGTERM and SIGHUP undo a start as Ctrl-C does."""

    def raise_interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {n: signal.signal(n, raise_interrupt) for n in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
