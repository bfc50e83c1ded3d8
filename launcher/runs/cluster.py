"""The commands' interface to a cluster: its hosts, and how to find, start and end runs."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from launcher.agent.checks.finding import Result
from launcher.errors import ConfigError, LauncherError, UnreachableError
from launcher.hosts import fleet, ssh
from launcher.hosts.fleet import LOOK, REACH, describe_pending, format_error
from launcher.hosts.survey import Survey, survey_connections
from launcher.inventory.hosts import Host, find_coordinator_host, load_inventory
from launcher.plan.budget import with_budget
from launcher.plan.configuration import (
    JobRequest,
    checkpoints_to_resume,
    with_free_output,
    with_shared_checkpoints,
)
from launcher.plan.plan import LaunchPlan
from launcher.plan.ring import ring_notes
from launcher.runs.budget.spending import IdleHost, idle_hosts
from launcher.runs.down import TeardownResult, tear_down
from launcher.runs.preflight.derived_settings import derive_data_settings
from launcher.runs.preflight.inspection import INPUT_CHECKS, inspect_hosts
from launcher.runs.records.registry import Registry
from launcher.runs.records.run import Run, is_run_id
from launcher.runs.records.stored_configs import (
    StartArguments,
    list_differences,
    read_run_config,
    read_start_arguments,
)
from launcher.runs.status import RunView, find_run
from launcher.runs.stopwatch import Stopwatch
from launcher.runs.up import Launch, bring_up, make_plan, refuse_failures, survey_hosts
from launcher.terminal import note, show_progress
from trainer.config.distill_job import DistillJob
from trainer.config.run import RunConfig
from trainer.config.section import parse_assignments
from trainer.system.errors import InputError


class Cluster:
    """The hosts of an inventory; without one, this machine. Hosts are read on first use."""

    def __init__(
        self,
        inventory: Path | None,
        start: StartArguments | None = None,
        report: Callable[[str], None] = note,
        *,
        accept_new_host_keys: bool = False,
    ) -> None:
        """Take the arguments that select hosts, and how to report progress, a line at a time.

        With `accept_new_host_keys`, the SSH keys of unknown hosts are recorded by this process.
        """
        if accept_new_host_keys:
            ssh.accept_new_host_keys()
        self.start = start or StartArguments()
        self.watch = Stopwatch()
        self.inventory = inventory
        self._report = report

    @cached_property
    def hosts(self) -> tuple[Host, ...]:
        """The selected hosts.

        Raises:
            ConfigError: the inventory or a variable cannot be used.
        """
        extra = parse_assignments(self.start.extra_vars, "-e")
        with show_progress("reading the inventory"):
            return load_inventory(self.inventory, limit=self.start.limit, extra=extra)

    @cached_property
    def registry(self) -> Registry:
        """The registry of the selected hosts, for a start.

        Raises:
            UnreachableError: none of them answers.
        """
        return Registry.for_hosts(self.hosts, REACH)

    def find_runs_registry(self, deadline: float = LOOK) -> Registry:
        """Return the runs to look at: the inventory's, or this machine's; reports if some lack.

        Raises:
            ConfigError: the inventory cannot be used.
            UnreachableError: none of its hosts answers.
        """
        if self.inventory is None:
            return Registry.for_this_user()
        registry = Registry.for_hosts(
            self.hosts, deadline, lambda answers: self._report(describe_pending(answers.late))
        )
        if registry.absence is not None:
            self._report(f"{registry.absence}; from the other hosts:")
        return registry

    def peek_registry(self) -> Registry:
        """Return the same at once and without a report: `absence` tells why some lack."""
        return (
            Registry.for_this_user() if self.inventory is None else Registry.for_hosts(self.hosts)
        )

    def read_runs(self) -> list[Run]:
        """Return every run, the oldest first."""
        return self.find_runs_registry().read_runs()

    def find_run(self, run_id: str | None) -> Run | None:
        """Return the named run; without a name the one that is up, else the latest."""
        return find_run(self.find_runs_registry(), run_id)

    def diagnose(self, order: JobRequest, whole: bool) -> list[Result]:
        """Return every check of a start; `whole`: of model, data, output and memory as well."""
        job = order.resolve_job(self.hosts)
        with show_progress("checking the hosts"):
            return check_hosts(
                self.hosts, job, self.start.expect_workers, whole, order.derived_settings
            )

    def plan_launch(
        self, order: JobRequest, resume: str | None, only_to_plan: bool, run_id: str | None = None
    ) -> Launch:
        """Read the job, ask the hosts what they have, and plan; changes nothing.

        Args:
            resume: the id of a run that continues: one of the registry brings its own job, for one
                whose output folder was copied here the order has it.
            only_to_plan: for a dry run, which checks nothing but a model and data of the user's,
                or a script's imports, on the hosts that it asks.
            run_id: the id of a new run; None makes one.

        Raises:
            LauncherError: the job cannot be used, or does not fit the hosts or the earlier start.
            PreflightError: a dry run's model, data or script would be refused by the start.
        """
        is_copied = resume is not None and order.source is not None
        if is_copied:
            self._refuse_known(order, str(resume))
        self.start = self.start.merge_with(read_start_arguments(resume))
        own = order.derived_settings if resume is None else None
        job = order.resolve_job(self.hosts) if resume is None or is_copied else None
        self.watch.end_lap("inventory")
        before: LaunchPlan | None = None
        if job is None:
            before = self.registry.get_run(str(resume)).plan
            job = self._resume_job(order, before)
            workers = self.start.expect_workers or len(before.workers) or None
            self.start = replace(self.start, expect_workers=workers)
        with show_progress("querying the hosts"):
            unasked = only_to_plan and own is None and order.script is None
            found = survey_hosts(self.hosts, only_to_plan=unasked)
        self.watch.end_lap("connect and survey")
        plan = make_plan(found, job, self.start.expect_workers, resume or run_id, order.script)
        lines: list[str] = []
        if before is not None:
            lines = [
                f"resuming {plan.run_id} {self.start}".rstrip(),
                *list_differences(before, plan),
            ]
        elif isinstance(job, RunConfig):
            if own is not None:
                with show_progress("measuring the data"):
                    job, lines = derive_data_settings(job, own, plan, found)
                self.watch.end_lap("settings")
            head = found.connections.get(plan.leader.host)
            if not is_copied:
                job = with_shared_checkpoints(
                    job, find_coordinator_host(found.hosts).share_folder, plan.run_id
                )
            elif head:
                lines = [checkpoints_to_resume(job, plan.run_id, head.list_folder)]
            if head:
                job, more = with_free_output(order, job, head.list_folder)
                workers = self.start.expect_workers
                plan = make_plan(found, job, workers, plan.run_id, order.script)
                lines += more
        job, remarks = with_budget(job, plan, found.identities, os.environ)
        lines += remarks
        if isinstance(job, RunConfig):
            lines += ring_notes(job.exchange, plan.run_id)
        elif job.budget is not None:  # its settings are in commands
            plan = make_plan(found, job, self.start.expect_workers, plan.run_id)
        for line in lines:
            self._report(line)
        if only_to_plan and order.brings_inputs:
            only = ("trainer",) if order.script else INPUT_CHECKS
            refuse_failures(inspect_hosts(found, plan, job, only, order.script), self._report)
        return Launch(plan, job, found, order.script)

    def start_run(self, launch: Launch, timeout: float | None, notify: Sequence[str] = ()) -> Run:
        """Start a run and return it once every process takes part; see `bring_up`.

        Raises:
            OverBudgetError: it would exceed the ceiling, or its cost is unknown; nothing was
            started.
        """
        from launcher.runs.budget.authorisation import (
            authorise_start,  # with the planner, which no look needs
        )

        authorise_start(launch.plan, launch.job, launch.found, self._report)
        start = (launch, self.start, self.registry, self._report, timeout, self.watch)
        return bring_up(*start, notify)

    def find_idle_hosts(self, view: RunView | None) -> list[IdleHost]:
        """Return the priced hosts of the inventory that do nothing; none without an inventory."""
        return [] if self.inventory is None else idle_hosts(self.hosts, view, time.time())

    def stop_runs(self, run_id: str | None, everything: bool) -> list[TeardownResult]:
        """Stop a run, or all of them; each ending says what may be left of it."""
        registry = self.find_runs_registry(REACH)
        run = None if everything else find_run(registry, run_id)
        runs = registry.read_runs() if everything else [run] if run is not None else []
        return [tear_down(run) for run in runs]

    def _refuse_known(self, order: JobRequest, run_id: str) -> None:
        """Refuse a config for a resumed run, unless its output folder is all that was copied here.

        Raises:
            ConfigError: the registry has the run, which brings its own config, or it is no id.
        """
        is_fine_tune = order.leader == "coordinator" and order.is_file
        if not is_run_id(run_id):
            raise ConfigError(f"--resume {run_id}: is not a run id")
        if not is_fine_tune or self.registry.read_runs({run_id}):
            flags = "--config" if order.leader == "student" else "--preset and --config"
            raise ConfigError(f"--resume {run_id} uses its own config; leave out {flags}")

    def _resume_job(self, order: JobRequest, before: LaunchPlan) -> RunConfig | DistillJob:
        """Return the job of a run that continues, with what is given in place of its settings.

        Raises:
            ConfigError: it is of another kind, its config cannot be used, or its steps would not
                fit the completed ones.
        """
        run_id, leader = before.run_id, before.leader.role
        if (leader == "student") != (order.leader == "student"):
            up = "launch distill up" if leader == "student" else "launch cluster up"
            raise ConfigError(f"run {run_id} has a {leader}; to resume it: {up} --resume {run_id}")
        config, remarks = read_run_config(self.registry, run_id, set(order.settings))
        for remark in remarks:
            self._report(remark)
        with tempfile.TemporaryDirectory(prefix="motley-") as folder:
            path = Path(folder, "run.yaml")
            path.write_bytes(config)
            again = replace(order, source=str(path))
            try:
                job = again.resolve_job(self.hosts)
            except InputError as error:
                message = str(error).replace(str(path), f"--resume {run_id}")
                raise InputError(message, error.details) from None
            if isinstance(job, RunConfig):
                kept = replace(again, settings={}).resolve_job(self.hosts)
                if isinstance(kept, RunConfig) and (changes := kept.list_changes(job)):
                    raise ConfigError(
                        f"--resume {run_id}: a run keeps these settings until its end: "
                        f"{', '.join(changes)}; leave them out, or start a new run"
                    )
        return job


def check_hosts(
    hosts: Sequence[Host],
    job: RunConfig | DistillJob,
    expect_workers: int | None,
    whole: bool,
    given: Collection[str] | None = None,
) -> list[Result]:
    """Check every host that answers; the others, and an impossible plan, are findings.

    Args:
        whole: check the job as well: model, data, output and memory.
        given: settings of a fine-tune that derives the others from its data; None: it has all.
    """
    answers = fleet.ask_hosts(hosts, lambda _, connection: connection, REACH)
    unreachable = {
        name: error
        if isinstance(error, LauncherError)
        else UnreachableError(format_error(name, error))
        for name, error in answers.errors.items()
    }
    found = survey_connections(hosts, answers.found, unreachable)
    try:
        plan = _plan_answering_hosts(found, job, expect_workers)
        if given is not None and plan is not None and isinstance(job, RunConfig):
            job, _ = derive_data_settings(job, given, plan, found)
    except LauncherError as error:
        unplanned = Result("plan", "cluster", "fail", str(error))
        return [*inspect_hosts(found, None, None), unplanned]
    return inspect_hosts(found, plan, job if whole and plan is not None else None)


def _plan_answering_hosts(
    found: Survey, job: RunConfig | DistillJob, expect_workers: int | None
) -> LaunchPlan | None:
    """Plan with the hosts that answer; None when the coordinator's is not among them."""
    if not found.failures:
        return make_plan(found, job, expect_workers)
    left = tuple(host for host in found.hosts if host.name not in found.failures)
    if not any(host.coordinator for host in left):
        return None
    return make_plan(replace(found, hosts=left), job, None)
