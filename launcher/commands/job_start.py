"""The steps that `launch cluster up` and `launch distill up` share: plan, start and show a job."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from launcher.plan.configuration import JobRequest
    from launcher.runs.cluster import Cluster


def start_job(
    cluster: Cluster,
    make_job_request: Callable[..., JobRequest],
    *,
    resume: str | None,
    wait: bool,
    timeout: float | None,
    notify: str | None,
    dry_run: bool,
    as_json: bool,
    **described: Any,
) -> None:
    """Start a job and show its run; with `wait` follow it to its end, with `dry_run` only plan.

    Args:
        make_job_request: returns the job that the flags besides `start_options` describe.
    """
    from launcher.runs.join import wait_for_first_step
    from launcher.runs.status import RunMonitor
    from launcher.terminal import note
    from launcher.views import render
    from launcher.views.follow import WATCH, follow_run
    from launcher.views.processes import processes_table
    from trainer.config.notify_command import read_notify_command
    from trainer.planning.resident_layers import list_residents

    command = read_notify_command(notify)
    launch = cluster.plan_launch(make_job_request(**described), resume, only_to_plan=dry_run)
    if dry_run:
        if as_json:
            render.print_json(json.loads(launch.plan.to_json()))
        else:
            for line in render.command_lines(launch.plan):
                render.say_whole(line)
        return
    run = cluster.start_run(launch, timeout, command)
    with render.detach_on_interrupt(WATCH, run.run_id):
        if wait_for_first_step(run, resumed=resume is not None):
            cluster.watch.end_lap("first step")
        note(cluster.watch.describe_laps())
        view = follow_run(run, note) if wait else RunMonitor(run).observe()
    if as_json:
        render.print_json({**render.status_tree(view), "timings": cluster.watch.seconds_by_lap()})
        return
    render.print_line(render.run_headline(view))
    if not view.result_lines:  # a card has them
        for line in list_residents(view.worker_reports):
            note(line)
    render.say_card(view)
    if not wait:
        render.make_console().print(processes_table(view, render.terminal_width()))
        note("the run goes on without this terminal: launch status, or launch cluster down")
