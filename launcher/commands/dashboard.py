"""`launch dashboard`: the cluster and its runs in a browser."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from launcher.commands.options import inventory_option
from trainer.system.commandline.options import PATH

if TYPE_CHECKING:
    from launcher.runs.cluster import Cluster
    from launcher.runs.output_run import OutputMonitor


@click.command()
@click.argument("outputs", metavar="[OUTPUT]...", nargs=-1, type=PATH)
@inventory_option
@click.option("--bind", metavar="ADDRESS", default="127.0.0.1", help="Where to listen.")
@click.option("--port", type=click.IntRange(0, 65535), default=8642, help="0: any free port.")
def dashboard(cluster: Cluster, outputs: tuple[Path, ...], bind: str, port: int) -> None:
    """Serve a read-only page of the hosts and runs, live, until Ctrl-C.

    OUTPUT is the output folder of a `trainer finetune`, whose run is then shown too.
    On an address that others reach, it uses TLS with the cluster's CA and a token in its URL.
    """
    from launcher.errors import ConfigError
    from launcher.views import render

    try:
        from launcher.views.dashboard.server import serve
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the dashboard needs the package {error.name}; install the extra: "
            "pip install 'motley[dashboard]'"
        ) from None
    serve(cluster, bind, port, render.print_line, _open_outputs(outputs))


def _open_outputs(folders: Sequence[Path]) -> list[OutputMonitor]:
    """Return the runs of output folders; of equal names all but the first get a number.

    Raises:
        ConfigError: a folder holds no report of a run.
    """
    from launcher.errors import ConfigError
    from launcher.runs.output_run import OutputMonitor, is_output

    found: dict[str, OutputMonitor] = {}
    for folder in folders:
        if not is_output(folder):
            raise ConfigError(f"{folder}: has no status.json; give an output folder of `trainer`")
        monitor = OutputMonitor(folder)
        name, number = monitor.run.run_id, 1
        while name in found:
            number += 1
            name = f"{monitor.run.run_id}-{number}"
        found[name] = OutputMonitor(folder, name)
    return list(found.values())
