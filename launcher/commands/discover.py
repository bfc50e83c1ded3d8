"""`launch discover`: find machines on the network and write an inventory."""

from __future__ import annotations

from pathlib import Path

import click

from launcher.commands.options import json_option
from trainer.system.commandline.number import Number


@click.command()
@click.argument("addresses", metavar="[ADDRESS]...", nargs=-1)
@click.option(
    "--user", metavar="NAME", help="Login name, unless the address or ssh_config gives one."
)
@click.option(
    "--ssh-config",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The ssh_config to read.  [default: ~/.ssh/config]",
)
@click.option("--no-mdns", is_flag=True, help="Do not listen for announcements.")
@click.option(
    "--seconds",
    type=Number(0.1, 60),
    default=3.0,
    show_default=True,
    help="How long to listen for announcements.",
)
@click.option("--no-links", is_flag=True, help="Do not measure the links between machines.")
@click.option(
    "--port",
    type=click.IntRange(1, 65535),
    default=9000,
    show_default=True,
    help="TCP port for measuring links.",
)
@click.option(
    "--write", "file", type=click.Path(path_type=Path), metavar="FILE",
    help="The inventory to write or update; its hosts are queried too.",
)  # fmt: skip
@click.option(
    "--accept-new-host-keys",
    "accept",
    is_flag=True,
    help="Record new SSH host keys of ADDRESS and FILE's hosts, and query only these.",
)
@json_option
def discover(
    addresses: tuple[str, ...], user: str | None, ssh_config: Path | None, no_mdns: bool,
    seconds: float, no_links: bool, port: int, file: Path | None, accept: bool, as_json: bool,
) -> None:  # fmt: skip
    """Find machines by mDNS, in ssh_config and at ADDRESS ([USER@]HOST[:PORT]); query each by SSH.

    Lists devices, memory, free disk and the rates between all pairs, and proposes who coordinates,
    keeps the share, teaches and learns. Changes no machine. Exits with 3 when one that was named is
    not reached or mDNS is blocked, with 4 when two have one host key or a link is missing.
    """
    from launcher.discovery.search import Search
    from launcher.discovery.search import discover as look
    from launcher.views import discovery, render

    search = Search(
        addresses=addresses, user=user, ssh_config=ssh_config, accept_new_host_keys=accept,
        mdns=not no_mdns, seconds=seconds, links=not no_links, port=port, inventory=file,
    )  # fmt: skip
    found = look(search)
    if as_json:
        render.print_json(discovery.discovery_tree(found))
    else:
        discovery.show(found)
    found.refuse_problems()
