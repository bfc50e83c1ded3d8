"""`launch discover`: find machines on the network and write an inventory."""

from __future__ import annotations

from typing import Any

import click

from launcher.commands.options import json_option
from trainer.system.commandline.number import Number
from trainer.system.commandline.options import PATH


@click.command()
@click.argument("addresses", metavar="[ADDRESS]...", nargs=-1)
@click.option(
    "--user", metavar="NAME", help="Login name, unless the address or ssh_config gives one."
)
@click.option(
    "--ssh-config",
    type=PATH,
    metavar="FILE",
    help="The ssh_config to read.  [default: ~/.ssh/config]",
)
@click.option("--no-mdns", is_flag=True, help="Do not listen for announcements.")
@click.option(
    "--seconds", type=Number(0.1, 60), default=3.0, help="How long to listen for announcements."
)
@click.option("--no-links", is_flag=True, help="Do not measure the links between machines.")
@click.option(
    "--port", type=click.IntRange(1, 65535), default=9000, help="TCP port for measuring links."
)
@click.option(
    "--write",
    "inventory",
    type=PATH,
    metavar="FILE",
    help="The inventory to write or update; its hosts are queried too.",
)
@click.option(
    "--accept-new-host-keys",
    is_flag=True,
    help="Record new SSH host keys of ADDRESS and FILE's hosts, and query only these.",
)
@json_option
def discover(no_mdns: bool, no_links: bool, as_json: bool, **sources: Any) -> None:
    """Find machines by mDNS, in ssh_config and at ADDRESS ([USER@]HOST[:PORT]); query each by SSH.

    Lists devices, memory, free disk and the rates between all pairs, and proposes who coordinates,
    keeps the shared folder, teaches and learns. Changes no machine. Exits with 3 when one that was
    named is not reached or mDNS is blocked, with 4 when two have one host key or a link is missing.
    """
    from launcher.discovery.search import Search
    from launcher.discovery.search import discover_machines as look
    from launcher.errors import raise_all
    from launcher.views import discovery, render

    found = look(Search(mdns=not no_mdns, links=not no_links, **sources))
    if as_json:
        render.print_json(discovery.discovery_tree(found))
    else:
        discovery.show_survey(found)
    raise_all(found.problems)
