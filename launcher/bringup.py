"""Start a run: plan, preflight, certificates, processes, and wait until every worker has joined.

Whatever goes wrong on the way, nothing is left running.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from launcher import devices
from launcher.certificates import Authority, identity_of
from launcher.connection import connect
from launcher.errors import (
    InterruptedStartError,
    JobFailedError,
    LauncherError,
    PartialError,
    PreflightError,
)
from launcher.host_checks import host_probes
from launcher.inventory import Host
from launcher.job_checks import job_probes, model_folder
from launcher.observation import Cockpit, RunView, live_runs
from launcher.placement import Setting, place
from launcher.plan import LaunchPlan, ProcessPlan
from launcher.preflight import Check, examine
from launcher.runs import Registry, Run, new_run_id
from launcher.supervisor import POLL
from launcher.teardown import tear_down, uninterrupted
from trainer.config import RunConfig

JOIN_MARGIN = 60.0
"""Seconds on top of the exchange's join deadline: imports, model load, data."""

FETCH_MARGIN = 7200.0
"""Seconds on top of that when a model has to be downloaded; a process that fails ends the wait."""

Report = Callable[[str], None]


@dataclass(frozen=True)
class Survey:
    """The hosts with what was learned from them."""

    hosts: tuple[Host, ...]
    problems: dict[str, tuple[str, ...]]
    """By host: devices that are there but unusable."""


def survey(hosts: Sequence[Host]) -> Survey:
    """Ask hosts for what the inventory leaves open.

    Raises:
        UnreachableError: a host that has to be asked cannot be driven.
    """
    local = sum(host.is_local for host in hosts)
    learned: list[Host] = []
    problems: dict[str, tuple[str, ...]] = {}
    for host in hosts:
        if not host.is_local:
            if host.devices is None:
                connect(host)
            learned.append(host)
            continue
        wants_gpu = any(device.backend == "cuda" for device in host.devices or ())
        found = devices.detect() if host.devices is None or wants_gpu else None
        if found is not None and host.devices is None:
            problems[host.name] = found.problems
            host = replace(host, devices=found.devices)
        elif found is not None and host.devices is not None:
            known = [_known(device, found.devices) for device in host.devices]
            problems[host.name] = tuple(
                f"there is no {device.backend} device {device.id}"
                for device, match in zip(host.devices, known, strict=True)
                if match is None
            )
            host = replace(
                host,
                devices=tuple(
                    match or device for device, match in zip(host.devices, known, strict=True)
                ),
            )
        learned.append(replace(host, cores=max(1, devices.usable_cores() // local)))
    return Survey(tuple(learned), problems)


def make_plan(
    found: Survey,
    config: RunConfig,
    expect_workers: int | None,
    registry: Registry,
    run_id: str | None = None,
) -> LaunchPlan:
    """Return where everything would run, under a new run id or a given one; changes nothing."""
    script = Path(sys.executable).with_name("trainer")
    command = (str(script),) if script.exists() else (sys.executable, "-m", "trainer.cli")
    setting = Setting(
        run_id=run_id or new_run_id(config.name),
        trainer_command=command,
        state_folder=str(registry.folder),
        routes={},
    )
    return place(found.hosts, config, expect_workers, setting)


def plan_tree(plan: LaunchPlan) -> dict[str, Any]:
    """Return a plan for programs, as `--dry-run --json` prints it."""
    return json.loads(plan.to_json())


def bring_up(
    plan: LaunchPlan,
    config: RunConfig,
    registry: Registry,
    problems: dict[str, tuple[str, ...]],
    report: Report,
    timeout: float | None = None,
) -> Run:
    """Start a run and return it once every worker has joined and training goes on.

    Raises:
        UnreachableError: the plan has hosts that cannot be driven.
        PreflightError: a check failed, or the cluster is busy; nothing was started.
        PartialError: workers are missing; names them with their last log lines.
        JobFailedError: the coordinator failed.
        InterruptedStartError: a signal came; whatever was started is stopped again.
    """
    for host in plan.hosts:
        connect(host)
    with registry.lock(f"run {plan.run_id}"), _signals_interrupt():
        _refuse_if_busy(registry, report)
        probes = [*host_probes(plan, registry.folder, problems), *job_probes(plan, config)]
        checks = examine(probes)
        refuse_failures(checks)
        for check in checks:
            if check.status == "warn":
                report(check.line)
        run = registry.create(plan, config.to_yaml())
        try:
            _start(run, registry, report)
            margin = JOIN_MARGIN + (FETCH_MARGIN if model_folder(config) is None else 0.0)
            allowed = timeout or config.exchange.join_deadline + margin
            _wait_until_joined(run, allowed, report)
        except BaseException as error:
            with uninterrupted():
                tear_down(run, grace=5.0)
            if isinstance(error, KeyboardInterrupt):
                raise InterruptedStartError(
                    f"interrupted; run {run.run_id} was stopped before it had begun"
                ) from None
            raise
        return run


def refuse_failures(checks: Sequence[Check]) -> None:
    """Raise PreflightError when a check failed: the first in its line, the rest as details."""
    failed = [check.line for check in checks if check.status == "fail"]
    if failed:
        raise PreflightError(failed[0], failed[1:])


def _refuse_if_busy(registry: Registry, report: Report) -> None:
    for view in live_runs(registry):
        if view.state in ("finished", "failed", "stopped"):
            report(f"ending what is left of run {view.run.run_id} ({view.state})")
            tear_down(view.run)
            continue
        raise PreflightError(
            f"the cluster is busy: run {view.run.run_id} is {view.state}; "
            "see: launch cluster status, end it: launch cluster down"
        )


def _start(run: Run, registry: Registry, report: Report) -> None:
    authority = Authority.open(registry.authority_folder())
    cockpit = Cockpit(run)
    for process in run.plan.processes:
        credentials = authority.issue(identity_of(process), process.names)
        for name, content in credentials.files().items():
            path = f"{process.folder}/tls/{name}"
            cockpit.connections[process.host].write(path, content)
    for process in run.plan.processes:
        head = run.plan.coordinator
        serves = process is not head and process.host == head.host
        cockpit.supervisor(process).start(process, head if serves else None)
    workers = len(run.plan.workers)
    report(
        f"started {run.run_id}: coordinator on {run.plan.coordinator.address}, {workers} workers"
    )


def _wait_until_joined(run: Run, timeout: float, report: Report) -> None:
    cockpit = Cockpit(run)
    until = time.monotonic() + timeout
    joined: list[int] | None = None
    while True:
        view = cockpit.observe()
        if run.is_going_down:
            raise InterruptedStartError(f"run {run.run_id} was taken down while it started")
        if view.state in ("failed", "stopped"):
            raise job_failure(cockpit, view)
        if view.state == "finished" or (view.state == "running" and not view.missing):
            return
        if view.joined != joined:
            joined = view.joined
            report(f"{len(joined)} of {len(run.plan.workers)} workers have joined")
        hopeless = [p for p in view.missing if view.processes[p.name].is_over]
        if hopeless and view.training is not None and view.training.get("state") == "finished":
            hopeless = []
        if hopeless or time.monotonic() > until:
            raise _missing_workers(cockpit, view, hopeless, timeout)
        time.sleep(2 * POLL)


def job_failure(cockpit: Cockpit, view: RunView) -> JobFailedError:
    """Return the error that says why the coordinator is gone."""
    coordinator = view.run.plan.coordinator
    ending = view.processes[coordinator.name].ending or view.processes[coordinator.name].state
    reason = f": {view.reason}" if view.reason else ""
    return JobFailedError(
        f"run {view.run.run_id} {view.state}: coordinator ended ({ending}){reason}",
        _evidence(cockpit, view, coordinator),
    )


def _missing_workers(
    cockpit: Cockpit, view: RunView, hopeless: Sequence[ProcessPlan], timeout: float
) -> LauncherError:
    missing = view.missing or list(view.run.plan.workers)
    total = len(view.run.plan.workers)
    names = ", ".join(f"{p.name} ({_condition(view, p)})" for p in hopeless or missing)
    when = "" if hopeless else f" within {timeout:.0f} s"
    details = [line for process in missing for line in _evidence(cockpit, view, process)]
    if not view.joined:
        details += _evidence(cockpit, view, view.run.plan.coordinator)
    return PartialError(
        f"{len(view.joined)} of {total} workers joined{when}; missing: {names}; all was stopped",
        details,
    )


def _condition(view: RunView, process: ProcessPlan) -> str:
    state = view.processes[process.name]
    return ", ".join(part for part in (state.state, state.ending) if part)


def _evidence(cockpit: Cockpit, view: RunView, process: ProcessPlan) -> list[str]:
    """Return a heading and the last log lines of a process."""
    lines = cockpit.last_lines(process)
    attempt = view.processes[process.name].attempt
    heading = f"{process.name} on {process.host}, attempt {attempt}, {_condition(view, process)}:"
    return [heading, *(f"  {line}" for line in lines or ["(it wrote nothing)"])]


def _known(device: devices.Device, found: Sequence[devices.Device]) -> devices.Device | None:
    if device.backend != "cuda":
        return device
    return next((other for other in found if other.answers_to(device.id)), None)


@contextlib.contextmanager
def _signals_interrupt() -> Generator[None]:
    """Make SIGTERM and SIGHUP undo a start as Ctrl-C does."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {n: signal.signal(n, interrupt) for n in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
