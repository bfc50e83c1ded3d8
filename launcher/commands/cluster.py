"""`launch cluster`: start a run, inspect it, stop it."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from launcher.commands.job_start import start_job
from launcher.commands.options import (
    PATH,
    config_options,
    config_order,
    inventory_option,
    inventory_options,
    json_option,
    run_option,
    start_options,
)

if TYPE_CHECKING:
    from launcher.runs.cluster import Cluster


@click.command()
@inventory_options
@config_options
@click.option(
    "--script",
    type=PATH,
    metavar="FILE",
    help="A model, data and loss of your own, in place of --model and --data.",
)
@start_options
def up(cluster: Cluster, **flags: Any) -> None:
    """Start a run and return when every worker has joined and training has begun.

    The run continues without this terminal. Without --preset or --config it is the quickstart;
    with a --model or --data of your own the settings follow from them. A --script is sent to the
    hosts, which run it.
    """
    start_job(cluster, config_order, **flags)


@click.command()
@inventory_option
@run_option
@click.option("--watch", "-w", is_flag=True, help="Refresh every second, until q.")
@json_option
def status(cluster: Cluster, run_id: str | None, watch: bool, as_json: bool) -> None:
    """Show the active run, or the latest one."""
    from rich.console import Group
    from rich.text import Text

    from launcher.runs.status import RunMonitor
    from launcher.views import render
    from launcher.views.follow import watch_run
    from launcher.views.processes import processes_table

    run = cluster.find_run(run_id)
    if run is None:
        idle = cluster.find_idle_hosts(None)
        if as_json:
            none = {"schema": "motley.cluster.status/2", "run_id": None, "state": "none"}
            render.print_json({**none, "idle": [asdict(host) for host in idle]})
        else:
            render.print_line("no run has been started here; start one with: launch cluster up")
            for line in render.idle_lines(idle):
                render.print_line(line)
        return
    if watch:
        watch_run(run, as_json)
        return
    with render.show_while_waiting() as show:
        view = RunMonitor(run).observe(
            on_late=lambda known: show(
                known.late,
                Group(
                    Text(render.run_headline(known)),
                    processes_table(known, render.terminal_width()),
                ),
            )
        )
    idle = cluster.find_idle_hosts(view)
    if as_json:
        tree = {**render.status_tree(view), "idle": [asdict(host) for host in idle]}
        render.print_json(tree)
        return
    render.print_line(render.run_headline(view))
    render.make_console().print(processes_table(view, render.terminal_width()))
    for remark in (*view.remarks, *view.unreachable.values(), *render.idle_lines(idle)):
        render.print_line(remark)
    render.print_line(f"output: {run.plan.output}")
    render.say_card(view)


@click.command()
@inventory_option
@run_option
@click.option(
    "--all",
    "everything",
    is_flag=True,
    help="Every active run, and every run with leftover processes.",
)
@json_option
def down(cluster: Cluster, run_id: str | None, everything: bool, as_json: bool) -> None:
    """Stop the run and check that none of its processes is left.

    The coordinator finishes its step and saves. If nothing runs, this does nothing.
    """
    from launcher.views import render

    endings = cluster.stop_runs(run_id, everything)
    if as_json:
        render.print_json(
            {
                "schema": "motley.cluster.down/2",
                "runs": [
                    {
                        "run_id": e.run_id,
                        "stopped": e.stopped,
                        "killed": e.stragglers,
                        "unstopped_hosts": e.left,
                    }
                    for e in endings
                ],
            }
        )
    else:
        for ending in endings:
            if ending.stopped or ending.stragglers:
                render.print_line(
                    f"{ending.run_id}: stopped {', '.join(ending.stopped) or 'nothing'}"
                )
                for straggler in ending.stragglers:
                    render.print_line(f"{ending.run_id}: killed a leftover process: {straggler}")
        if not any(ending.stopped or ending.stragglers or ending.left for ending in endings):
            render.print_line("nothing was running")
        elif not any(ending.left for ending in endings):
            render.print_line("no process is left")
    for ending in endings:
        ending.require_all()
