"""The part of every `up` that follows once hosts and job are known."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from launcher.plan.plan import LaunchPlan
    from launcher.preflight.survey import Survey
    from launcher.runs.kept_configs import Start
    from launcher.runs.registry import Registry
    from launcher.runs.stopwatch import Stopwatch
    from trainer.config.distill_job import DistillJob
    from trainer.config.run import RunConfig


def show_plan(plan: LaunchPlan, as_json: bool) -> None:
    """Print the planned start: the commands of each host, or the plan."""
    from launcher.runs import up
    from launcher.views import render

    if as_json:
        render.print_json(up.plan_tree(plan))
    else:
        for line in render.command_lines(plan):
            render.say(line)


def say_how_it_goes_on(start: Start, before: LaunchPlan, plan: LaunchPlan) -> None:
    """Print where a resumed run continues, and what differs from the earlier start."""
    from launcher.runs.kept_configs import differences
    from launcher.views import render

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
    """Start a run and show it; with `wait` follow it to its end."""
    from launcher.runs import up
    from launcher.runs.join import wait_for_first_step
    from launcher.runs.status import RunMonitor
    from launcher.views import render
    from launcher.views.follow import follow_run

    run = up.bring_up(plan, job, registry, found, render.note, timeout, watch, start)
    if wait_for_first_step(run, resumed=resumed):
        watch.lap("first step")
    render.note(watch.line())
    view = follow_run(run, render.note) if wait else RunMonitor(run).observe()
    if as_json:
        render.print_json({**render.status_tree(view), "timings": watch.tree()})
        return
    render.tell(render.headline(view))
    render.say_card(view)
    if not wait:
        render.console().print(render.status_table(view, render.width()))
        render.note("the run continues without this terminal: launch cluster status | logs | down")
