"""The steps of `launch doctor`: all checks of a start, even if some cannot run."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from launcher.agent.checks.finding import Result
from launcher.errors import LauncherError, UnreachableError
from launcher.hosts import fleet
from launcher.hosts.fleet import REACH, line_of
from launcher.hosts.survey import Survey, survey_connected
from launcher.inventory.hosts import Host
from launcher.plan.plan import LaunchPlan
from launcher.runs.preflight.inspection import inspect_hosts
from launcher.runs.preflight.own_settings import follow_data
from launcher.runs.up import make_plan
from trainer.config.distill_job import DistillJob
from trainer.config.run import RunConfig


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
        name: error if isinstance(error, LauncherError) else UnreachableError(line_of(name, error))
        for name, error in answers.errors.items()
    }
    found = survey_connected(hosts, answers.found, unreachable)
    try:
        plan = _plan_answering_hosts(found, job, expect_workers)
        if given is not None and plan is not None and isinstance(job, RunConfig):
            job, _ = follow_data(job, given, plan, found)
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
