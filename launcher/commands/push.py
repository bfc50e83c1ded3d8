"""`launch cluster push`: update Motley on every host."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import click

from launcher.commands.options import cluster_options, json_option
from trainer.system.commandline.options import PATH

if TYPE_CHECKING:
    from launcher.runs.cluster import Cluster


@click.command()
@cluster_options
@click.option(
    "--wheel",
    type=PATH,
    metavar="FILE",
    help="The wheel to install; else one is built from this checkout.",
)
@click.option("--rollback", is_flag=True, help="Return to the previous version, on every host.")
@click.option(
    "--quick", is_flag=True, help="Refuse if dependencies changed: they take minutes to install."
)
@click.option(
    "--force",
    is_flag=True,
    help="Update even while a run is active; the run keeps its version until it is resumed.",
)
@click.option("--dry-run", is_flag=True, help="Print what would change; install nothing.")
@json_option
def push(
    cluster: Cluster,
    wheel: Path | None,
    rollback: bool,
    quick: bool,
    force: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Update Motley on every host that the trainer recipe has set up.

    Every host is checked first; if one cannot be updated, none is. The previous version is kept.
    """
    from launcher.errors import ConfigError
    from launcher.terminal import note
    from launcher.transfer.push import Fleet, serialize_update
    from launcher.transfer.wheel import choose_wheel
    from launcher.views import render

    if rollback and wheel is not None:
        raise ConfigError("--rollback returns to the version on the hosts; leave out --wheel")
    fleet = Fleet(cluster.hosts, note)
    with tempfile.TemporaryDirectory(prefix="motley-push-") as folder:
        built = None if rollback else choose_wheel(wheel, Path(folder))
        updates = fleet.push_version(built, quick=quick, force=force, dry_run=dry_run)
    if as_json:
        tree = {
            "schema": "motley.push/1",
            "dry_run": dry_run,
            "version": built.version if built else None,
            "sha256": built.sha256 if built else None,
            "hosts": [serialize_update(update) for update in updates],
        }
        render.print_json(tree)
        return
    for update in updates:
        render.print_line(update.describe)
