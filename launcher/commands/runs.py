"""`launch runs`: the runs of all users of a cluster."""

from __future__ import annotations

from pathlib import Path

import click

from launcher.commands.cluster_access import open_registry
from launcher.commands.options import inventory_option, json_option


@click.command()
@inventory_option
@json_option
def runs(inventory: Path | None, as_json: bool) -> None:
    """List the runs of a cluster, the oldest first; those of this machine without an inventory."""
    from launcher.runs.status import RunMonitor
    from launcher.views import render

    views = [RunMonitor(run).observe() for run in open_registry(inventory).all()]
    if as_json:
        tree = [
            {
                "run_id": view.run.run_id,
                "state": view.state,
                "reason": view.reason,
                "live": view.is_live,
                "started": view.run.started,
                "workers": len(view.run.plan.followers),
                "output": view.run.plan.output,
            }
            for view in views
        ]
        render.print_json({"schema": "motley.runs/1", "runs": tree})
        return
    render.console().print(render.runs_table(views, render.width()))
