"""`launch sync`: copy models, data and logits to the hosts, and checkpoints from them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from launcher.commands import completion
from launcher.commands.options import cluster_options, json_option
from trainer.system.commandline.options import PATH

if TYPE_CHECKING:
    from launcher.runs.cluster import Cluster
    from launcher.transfer.sync import SyncResult


@click.command()
@click.argument("paths", nargs=-1, required=True, type=PATH, metavar="PATH...")
@cluster_options
@json_option
def inputs(cluster: Cluster, paths: tuple[Path, ...], as_json: bool) -> None:
    """Copy model folders and data files to every host: STATE_FOLDER/inputs/NAME."""
    from launcher.terminal import note
    from launcher.transfer import sync

    hosts = cluster.hosts
    _print_results("inputs", sync.push_inputs(hosts, paths, note), as_json)


@click.command()
@click.argument("folder", required=False, type=PATH)
@click.option(
    "--from",
    "origin",
    metavar="HOST",
    shell_complete=completion.host_names,
    help="Fetch them from this host first.",
)
@cluster_options
@json_option
def logits(cluster: Cluster, folder: Path | None, origin: str | None, as_json: bool) -> None:
    """Copy a teacher's logits to the hosts that have no mounted shared folder.

    With --from they come from a host, via FOLDER (by default in the state folder).
    """
    from launcher.errors import ConfigError
    from launcher.files import default_state_folder
    from launcher.terminal import note
    from launcher.transfer import sync

    hosts = cluster.hosts
    done: list[SyncResult] = []
    if origin is not None:
        source = next((host for host in hosts if host.name == origin), None)
        if source is None:
            raise ConfigError(f"--from {origin}: no such host in the inventory")
        folder = folder or default_state_folder() / "logits"
        done.append(sync.pull_folder(source, "logits", "", folder, note))
        hosts = tuple(host for host in hosts if host.name != origin)
    if folder is None:
        raise ConfigError("name the folder of the logits, or the host that has them: --from HOST")
    _print_results("logits", [*done, *sync.push_logits(hosts, folder, note)], as_json)


@click.command()
@click.option(
    "--output", "-o", type=PATH, default="checkpoints", metavar="DIR", help="The target folder."
)
@click.option(
    "--name", default="", show_default=False, metavar="NAME", help="Only the folder of this name."
)
@click.option(
    "--from",
    "origin",
    metavar="HOST",
    shell_complete=completion.host_names,
    help="The source host; the coordinator's by default.",
)
@cluster_options
@json_option
def checkpoints(
    cluster: Cluster, output: Path, name: str, origin: str | None, as_json: bool
) -> None:
    """Fetch checkpoints from the coordinator's host; only complete ones appear here."""
    from launcher.errors import ConfigError
    from launcher.terminal import note
    from launcher.transfer import sync

    hosts = cluster.hosts
    wanted = [
        h for h in hosts if (h.name == origin if origin else h.coordinator or len(hosts) == 1)
    ]
    if not wanted:
        raise ConfigError(
            f"--from {origin}: no such host in the inventory"
            if origin
            else "no host has motley_coordinator: true; name one: --from HOST"
        )
    done = sync.pull_folder(wanted[0], "checkpoints", name, output, note)
    _print_results("checkpoints", [done], as_json)


def _print_results(what: str, done: Sequence[SyncResult], as_json: bool) -> None:
    from launcher.views import render

    if not as_json:
        for synced in done:
            render.print_line(synced.describe)
        return
    hosts = [
        {
            "host": synced.host,
            "folder": synced.folder,
            "files": synced.moved.files,
            "bytes": synced.moved.size,
            "sent_bytes": synced.moved.sent,
            "complete_folders": list(synced.complete),
            "note": synced.note,
        }
        for synced in done
    ]
    render.print_json({"schema": "motley.sync/2", "content": what, "hosts": hosts})
