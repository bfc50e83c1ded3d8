"""`launch cluster push`: a new version of Motley for every host."""

from __future__ import annotations

import tempfile
from pathlib import Path

import click

from launcher.commands.cluster_access import read_hosts
from launcher.commands.options import cluster_options, json_option


@click.command()
@cluster_options
@click.option(
    "--wheel",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="This wheel; else one of this checkout is built.",
)
@click.option("--rollback", is_flag=True, help="Return to the previous version, on every host.")
@click.option(
    "--quick", is_flag=True, help="Refuse when dependencies changed, which takes minutes."
)
@click.option("--force", is_flag=True, help="Also while a run is up; the run keeps its version.")
@click.option("--dry-run", is_flag=True, help="Print what would change; install nothing.")
@json_option
def push(
    inventory: Path | None,
    limit: str,
    extra_vars: tuple[str, ...],
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
    from launcher.deploy import push as pushing
    from launcher.deploy.environments import read_wheel
    from launcher.deploy.wheel import BuiltWheel, build_wheel, checkout_folder
    from launcher.errors import ConfigError
    from launcher.views import render

    if rollback and wheel is not None:
        raise ConfigError("--rollback returns to the version on the hosts; leave out --wheel")
    fleet = pushing.Fleet(read_hosts(inventory, limit, extra_vars), render.note)
    with tempfile.TemporaryDirectory(prefix="motley-push-") as folder:
        built: BuiltWheel | None = None
        if wheel is not None:
            facts = read_wheel(wheel)
            built = BuiltWheel(facts.path, facts.version, facts.sha256)
        elif not rollback:
            checkout = checkout_folder()
            if checkout is None:
                raise ConfigError("this is an installed Motley, not a checkout; name one: --wheel")
            built = build_wheel(checkout, Path(folder))
        fleet.skip_own()
        updates = fleet.examine(built)
        if not dry_run:
            pushing.refuse(updates, quick, force)
            fleet.apply(updates, built, force)
    if as_json:
        tree = {
            "schema": "motley.push/1",
            "dry_run": dry_run,
            "version": built.version if built else None,
            "sha256": built.sha256 if built else None,
            "hosts": [pushing.update_tree(update) for update in updates],
        }
        render.print_json(tree)
        return
    for update in updates:
        render.say(update.line)
