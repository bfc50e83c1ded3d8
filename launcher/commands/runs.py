"""`launch runs`: the runs of all users of a cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from launcher.commands.options import inventory_option, json_option

if TYPE_CHECKING:
    from launcher.runs.cluster import Cluster


@click.command()
@inventory_option
@json_option
def runs(cluster: Cluster, as_json: bool) -> None:
    """List the runs of a cluster, the oldest first; those of this machine without an inventory."""
    from launcher.runs.status import RunMonitor
    from launcher.views import render

    monitors = [RunMonitor(run) for run in cluster.read_runs()]
    with render.show_while_waiting() as show:
        views = [monitor.observe() for monitor in monitors]
        if late := sorted({name for view in views for name in view.late}):
            show(late, render.runs_table(views, render.terminal_width()))
            views = [
                monitor.observe(on_late=lambda _: None) if view.late else view
                for monitor, view in zip(monitors, views, strict=True)
            ]
    if as_json:
        tree = [
            {
                "run_id": view.run.run_id,
                "state": view.state,
                "reason": view.reason,
                "live": view.is_live,
                "started": view.run.started,
                "workers": len(view.run.plan.workers or view.run.plan.followers),
                "output": view.run.plan.output,
            }
            for view in views
        ]
        render.print_json({"schema": "motley.runs/1", "runs": tree})
        return
    render.make_console().print(render.runs_table(views, render.terminal_width()))
