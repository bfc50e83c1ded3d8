"""`launch logs`: print the output of processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from launcher.commands import completion
from launcher.commands.options import inventory_option, json_option, run_option

if TYPE_CHECKING:
    from launcher.runs.cluster import Cluster


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME]...", shell_complete=completion.process_names)
@click.option(
    "--follow", "-f", is_flag=True, help="Print new lines as they come, also of new attempts."
)
@click.option("--tail", type=click.IntRange(min=0), metavar="N", help="Only the last N lines.")
@click.option(
    "--attempt",
    type=click.IntRange(min=1),
    metavar="K",
    help="The K-th attempt; the last one by default.",
)
@click.option(
    "--since",
    metavar="AGE|TIME",
    help="Only lines since 90s, 10m, 2h, 1d ago or an ISO time; up to 5 s more.",
)
@inventory_option
@run_option
@json_option
def logs(
    cluster: Cluster,
    names: tuple[str, ...],
    follow: bool,
    tail: int | None,
    attempt: int | None,
    since: str | None,
    run_id: str | None,
    as_json: bool,
) -> None:
    """Print the logs of processes, such as worker-2 or coordinator; by default of all."""
    from launcher.errors import ConfigError
    from launcher.terminal import note
    from launcher.views import render
    from launcher.views.log_printer import parse_since
    from launcher.views.logs import Selection, make_log_reader

    if follow and attempt is not None:
        raise ConfigError("--follow continues with the latest attempt; leave out --attempt")
    selection = Selection(
        attempt=attempt,
        tail=tail,
        since=parse_since(since) if since else None,
    )
    run = cluster.find_run(run_id)
    reader = make_log_reader(run, names, selection, as_json)
    if run is None or not follow:
        reader.print_existing(note)
        return
    with render.detach_on_interrupt(" ".join(["launch logs", *names, "-f"]), run.run_id):
        reader.follow(note)
