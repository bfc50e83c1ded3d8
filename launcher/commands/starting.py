"""What every `up` does once it knows the hosts and the job."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from launcher.kept_configs import Start
    from launcher.plan import LaunchPlan
    from launcher.runs import Registry
    from launcher.stopwatch import Stopwatch
    from launcher.survey import Survey
    from trainer.config import RunConfig
    from trainer.distill_job import DistillJob


def show_plan(plan: LaunchPlan, as_json: bool) -> None:
    """Print what would be started: the commands of each host, or the plan."""
    from launcher import bringup, render

    if as_json:
        render.print_json(bringup.plan_tree(plan))
    else:
        for line in render.command_lines(plan):
            render.say(line)


def say_how_it_goes_on(start: Start, before: LaunchPlan, plan: LaunchPlan) -> None:
    """Say what a resumed run goes on with, and what is otherwise than it was."""
    from launcher import render
    from launcher.kept_configs import differences

    render.note(f"resuming {plan.run_id} {start}".rstrip())
    for line in differences(before, plan):
        render.note(line)


def start_run(
    plan: LaunchPlan,
    job: RunConfig | DistillJob,
    registry: Registry,
    found: Survey,
    watch: Stopwatch,
    *,
    resumed: bool,
    wait: bool,
    timeout: float | None,
    as_json: bool,
    start: Start,
) -> None:
    """Bring a run up and show it; with `wait` follow it to its end."""
    from launcher import bringup, render
    from launcher.following import follow_run
    from launcher.joining import wait_for_first_step
    from launcher.observation import Cockpit

    run = bringup.bring_up(plan, job, registry, found, render.note, timeout, watch, start)
    if wait_for_first_step(run, resumed=resumed):
        watch.lap("first step")
    render.note(watch.line())
    view = follow_run(run, render.note) if wait else Cockpit(run).observe()
    if as_json:
        render.print_json({**render.status_tree(view), "timings": watch.tree()})
        return
    render.tell(render.headline(view))
    if not wait:
        render.console().print(render.status_table(view, render.width()))
        render.note("it goes on without this terminal: launch cluster status | logs | down")
