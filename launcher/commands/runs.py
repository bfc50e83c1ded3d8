"""`launch runs`: what was started from here."""

from __future__ import annotations

import click

from launcher.commands.options import json_option


@click.command()
@json_option
def runs(as_json: bool) -> None:
    """List the runs that were started from here, the oldest first."""
    from launcher import render
    from launcher.observation import Cockpit
    from launcher.runs import Registry

    views = [Cockpit(run).observe() for run in Registry.default().all()]
    if as_json:
        tree = [
            {
                "run_id": view.run.run_id,
                "state": view.state,
                "live": view.is_live,
                "started": view.run.started,
                "workers": len(view.run.plan.workers),
                "output": view.run.plan.output,
            }
            for view in views
        ]
        render.print_json({"schema": "motley.runs/1", "runs": tree})
        return
    rows = [
        (
            view.run.run_id,
            view.state,
            render.moment(view.run.started),
            str(len(view.run.plan.workers)),
            render.progress(view.training or {}),
            view.run.plan.output,
        )
        for view in views
    ]
    columns = ("RUN", "STATE", "STARTED", "WORKERS", "PROGRESS", "OUTPUT")
    render.console().print(render.table(columns, rows))
