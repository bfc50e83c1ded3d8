"""`launch dashboard`: the cluster and its runs in a browser."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from launcher.commands.options import inventory_option

if TYPE_CHECKING:
    from launcher.runs.cluster import Cluster


@click.command()
@inventory_option
@click.option("--bind", metavar="ADDRESS", default="127.0.0.1", help="Where to listen.")
@click.option("--port", type=click.IntRange(0, 65535), default=8642, help="0: any free port.")
def dashboard(cluster: Cluster, bind: str, port: int) -> None:
    """Serve a read-only page of the hosts and runs, live, until Ctrl-C.

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
    serve(cluster, bind, port, render.say)
