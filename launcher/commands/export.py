"""`launch export`: write a run as a folder for another system."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from launcher.commands.options import (
    cluster_options,
    config_options,
    config_order,
    json_option,
    run_option,
)
from trainer.system.commandline.options import PATH

if TYPE_CHECKING:
    from launcher.export.bundle import Render
    from launcher.runs.cluster import Cluster

_SYSTEMS = ("torchrun", "slurm", "skypilot", "kubernetes")


def _find_renderer(system: str) -> Render:
    from launcher.export.kubernetes import render_kubernetes
    from launcher.export.skypilot import render_skypilot
    from launcher.export.slurm import render_slurm
    from launcher.export.torchrun import render_torchrun

    ways: tuple[Render, ...] = (render_torchrun, render_slurm, render_skypilot, render_kubernetes)
    return ways[_SYSTEMS.index(system)]


@click.command()
@click.option(
    "--to",
    "system",
    type=click.Choice(_SYSTEMS),
    required=True,
    help="The system that starts the processes.",
)
@click.option(
    "--target",
    "text",
    metavar="TEXT",
    help="Equal nodes, e.g. '2 nodes x 8 H100'; default: the hosts.",
)
@run_option
@click.option("--into", type=PATH, metavar="DIR", help="The folder to write.")
@click.option(
    "--wheel", type=PATH, metavar="FILE", help="A wheel of Motley; default: this checkout."
)
@config_options
@cluster_options
@json_option
def export(
    cluster: Cluster,
    system: str,
    text: str | None,
    run_id: str | None,
    into: Path | None,
    wheel: Path | None,
    as_json: bool,
    **described: Any,
) -> None:
    """Export a run to another system of equal devices; start nothing.

    The run is a new one, given by a config, or an existing one (--run) that continues there.
    """
    from launcher.export.bundle import export_run
    from launcher.export.export_source import open_new_run, open_own_run
    from launcher.export.target import choose_target, parse_target
    from launcher.runs.up import survey_hosts
    from launcher.views import render

    target = (
        choose_target(survey_hosts(cluster.hosts).hosts) if text is None else parse_target(text)
    )
    order = config_order(**described)
    outgoing = (
        open_new_run(order)
        if run_id is None
        else open_own_run(cluster.find_runs_registry(), run_id, order)
    )
    folder = into or Path(f"export-{outgoing.run_id}")
    done = export_run(
        outgoing.run_id, outgoing.config, target, _find_renderer(system), folder, wheel
    )
    if as_json:
        tree = {"run_id": done.run_id, "system": system, "target": target.text, "step": done.step}
        where = {"folder": str(folder.absolute()), "next_steps": done.steps}
        render.print_json({"schema": "motley.exported/2", **tree, **where})
        return
    begun = f"from step {done.step}" if done.step else "from the start"
    render.print_line(f"{folder}: run {done.run_id} for {system}, {target.text}, {begun}; next:")
    for step in done.steps:
        render.print_line(f"  {step}")
    budget = outgoing.config.budget
    if done.step and budget is not None and budget.ceiling is not None:
        render.print_line(
            "budget.ceiling: counts what the run costs there, not what it has cost here"
        )
