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

    views = [RunMonitor(run).observe() for run in cluster.runs()]
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
    render.console().print(render.runs_table(views, render.width()))
