"""`launch queue`: run one job after another on the hosts of a cluster."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from launcher.commands import completion
from launcher.commands.options import (
    config_options,
    config_order,
    inventory_option,
    inventory_options,
    json_option,
    timeout_option,
)
from trainer.system.commandline.options import notify_option

if TYPE_CHECKING:
    from collections.abc import Callable

    from launcher.runs.cluster import Cluster
    from launcher.runs.records.run import Run
    from launcher.runs.status import RunView


@click.command()
@inventory_options
@config_options
@timeout_option
@json_option
def add(cluster: Cluster, timeout: float | None, as_json: bool, **described: Any) -> None:
    """Add a run to the queue; its options are those of `launch cluster up`.

    A config is kept as it is now, and of -e only motley_ variables. `launch queue run` starts it.
    """
    from launcher.runs.queue import check_inputs, enqueue_job
    from launcher.views import render

    order = config_order(**described)
    check_inputs(cluster, order)
    run_id = enqueue_job(cluster, order, timeout)
    if as_json:
        render.print_json({"schema": "motley.queue.add/1", "id": run_id})
    else:
        render.print_line(f"{run_id} queued; start it with: launch queue run")


@click.command("list")
@inventory_option
@json_option
def list_queue(cluster: Cluster, as_json: bool) -> None:
    """List the queue, the oldest job first: what waits, was started, and is over."""
    from launcher.runs.queue import open_queue
    from launcher.views import render

    entries, skipped = open_queue(cluster.inventory)[0].read_entries()
    if as_json:
        tree = [
            {
                "id": entry.id,
                "state": entry.state,
                "added_by": entry.job.added_by,
                "added_at": entry.job.added_at,
                "end": asdict(entry.end) if entry.end else None,
            }
            for entry in entries
        ]
        render.print_json({"schema": "motley.queue/2", "entries": tree, "skipped": skipped})
        return
    for entry in entries:
        why = f": {entry.end.reason}" if entry.end and entry.end.reason else ""
        added = f"added {render.format_time(entry.job.added_at)} by {entry.job.added_by}"
        render.print_line(f"{entry.id}: {entry.state}{why} ({added})")
    for name, reason in skipped.items():
        render.print_line(f"skipped: {name}: {reason}")
    if not entries and not skipped:
        render.print_line("the queue is empty; add a run: launch queue add")


@click.command()
@inventory_option
@click.argument("run_id", metavar="ID", shell_complete=completion.queued_ids)
def remove(cluster: Cluster, run_id: str) -> None:
    """Remove a job that waits or is over; its run is kept. One that was started is refused."""
    from launcher.runs.queue import open_queue
    from launcher.views import render

    open_queue(cluster.inventory)[0].remove(run_id)
    render.print_line(f"{run_id} removed from the queue")


@click.command()
@inventory_option
@notify_option
def run(cluster: Cluster, notify: str | None) -> None:
    """Run what waits, one after another, until Ctrl-C, which leaves the present run alone.

    A job that fails does not keep the next ones. Hosts that do not answer are waited for.
    """
    from launcher.runs.queue import QueueRunner
    from launcher.views import render
    from launcher.views.follow import follow_run
    from trainer.config.notify_command import read_notify_command

    def follow(run: Run, report: Callable[[str], None]) -> RunView:
        with render.detach_on_interrupt("launch queue run", run.run_id):
            return follow_run(run, report)

    command = read_notify_command(notify)
    QueueRunner(cluster.inventory, follow, notify=command).run_forever()
