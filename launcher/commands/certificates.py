"""`launch certificates`: TLS for runs that are started by hand."""

from __future__ import annotations

from pathlib import Path

import click

from launcher.commands.options import json_option
from trainer.system.commandline.options import PATH
from trainer.system.commandline.run_id import RunId


@click.command()
@click.option("--output", "-o", type=PATH, required=True, help="The folder to make.")
@click.option(
    "--ranks", type=click.IntRange(1, 1024), required=True, metavar="N", help="Workers of the run."
)
@click.option(
    "--host",
    "hosts",
    multiple=True,
    metavar="NAME_OR_ADDRESS",
    help="An address or name of a process; every certificate lists it.",
)
@click.option(
    "--run-id",
    type=RunId(),
    metavar="ID",
    default="run",
    help="The run as the trainer's --run-id, else its config's `name`; valid for no other.",
)
@click.option("--force", is_flag=True, help="Replace an existing bundle.")
@json_option
def certificates(
    output: Path, ranks: int, hosts: tuple[str, ...], run_id: str, force: bool, as_json: bool
) -> None:
    """Write certificates of the cluster's CA for a run that is started by hand.

    A run of `launch cluster up` does not need them. Each machine gets the folder of its own
    process, under that name; give the trainer the folder that contains it: --tls DIR.
    """
    from launcher.runs.certificates.authority import LEAF_LIFETIME, Authority
    from launcher.runs.certificates.bundle import write_bundle
    from launcher.runs.records.registry import authority_folder
    from launcher.views import render

    authority = Authority.open(authority_folder())
    bundle = write_bundle(authority, output, run_id, ranks, hosts, replace=force)
    if as_json:
        render.print_json(
            {
                "schema": "motley.certificates/1",
                "folder": str(bundle.folder),
                "run_id": run_id,
                "members": list(bundle.members),
                "hosts": list(hosts),
                "days": LEAF_LIFETIME.days,
            }
        )
        return
    render.print_line(
        f"{bundle.folder}: {', '.join(bundle.members)}; valid for {LEAF_LIFETIME.days} days and "
        f"for the run {run_id}"
    )
