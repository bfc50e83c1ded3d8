"""The test bed by hand: `python -m tests.testbed up w1 w2=trixie`, `ssh w1`, `cut w1`, `down`."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import click

from tests.testbed.errors import LabError
from tests.testbed.image import SUITES, cache_folder, image
from tests.testbed.lab import Lab
from tests.testbed.plan import Plan

AS_IS = {"ignore_unknown_options": True, "allow_interspersed_args": False}


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--lab",
    "folder",
    type=click.Path(path_type=Path),
    envvar="MOTLEY_TESTBED",
    help="The lab's folder ($MOTLEY_TESTBED); by default one in the user's cache.",
)
@click.pass_context
def testbed(context: click.Context, folder: Path | None) -> None:
    """Booted Debian hosts on this machine, in namespaces of their own (needs root)."""
    context.obj = Lab(folder or cache_folder() / "lab")


@testbed.command()
@click.argument("names", nargs=-1, metavar="[NAME[=SUITE]]...")
@click.option("--disk", metavar="SIZE", help="Limit each new host's disk, such as 600M.")
@click.option(
    "--volume",
    "volumes",
    multiple=True,
    metavar="PATH=SIZE",
    help="A small file system of its own, such as /var/lib/motley=20M.",
)
@click.pass_obj
def up(lab: Lab, names: Sequence[str], disk: str | None, volumes: Sequence[str]) -> None:
    """Make the lab if there is none, then add and boot hosts (bookworm or trixie)."""
    started = time.monotonic()
    pairs = [volume.rpartition("=") for volume in volumes]
    sizes = {path: size for path, _, size in pairs}
    wanted = [name.partition("=") for name in names or ("w1", "w2", "w3")]
    plans = [
        Plan(name=name, suite=suite or "bookworm", ip=ip, disk=disk, volumes=sizes)
        for (name, _, suite), ip in zip(wanted, lab.free_addresses(len(wanted)), strict=True)
    ]
    new = not lab.is_up
    if new:
        lab.up()
    try:
        hosts = lab.add_hosts(plans)
    except BaseException:
        if new:
            lab.down()
        raise
    for host in hosts:
        click.echo(f"{host.name}  {host.ip}  {SUITES[host.plan.suite]}")
    click.echo(f"up in {time.monotonic() - started:.1f} s: {lab.folder}")


@testbed.command()
@click.pass_obj
def down(lab: Lab) -> None:
    """Remove the lab and all its hosts."""
    lab.down()


@testbed.command()
@click.pass_obj
def status(lab: Lab) -> None:
    """Show the hosts: name, address, system, power, link."""
    if not lab.is_up:
        raise LabError(f"{lab.folder}: no lab is up; python -m tests.testbed up")
    for name, host in lab.hosts.items():
        power = "on" if host.running else "off"
        link = (host.rate or "full speed") if host.linked else "cut"
        click.echo(f"{name:12} {host.ip:12} {SUITES[host.plan.suite]:10} {power:4} {link}")


@testbed.command()
@click.argument("name")
@click.argument("rate")
@click.pass_obj
def shape(lab: Lab, name: str, rate: str) -> None:
    """Limit a host's link both ways to RATE (50mbit; `none`: no limit)."""
    lab.host(name).shape(None if rate == "none" else rate)


@testbed.command()
@click.argument("names", nargs=-1, required=True)
@click.pass_obj
def cut(lab: Lab, names: Sequence[str]) -> None:
    """Pull the cable of hosts."""
    for name in names:
        lab.host(name).cut()


@testbed.command()
@click.argument("names", nargs=-1, required=True)
@click.pass_obj
def heal(lab: Lab, names: Sequence[str]) -> None:
    """Put the cable of hosts back."""
    for name in names:
        lab.host(name).heal()


@testbed.command()
@click.argument("verb", type=click.Choice(["on", "off", "reboot", "crash"]))
@click.argument("name")
@click.pass_obj
def power(lab: Lab, verb: str, name: str) -> None:
    """Switch a host on or off in order, reboot it, or pull its plug."""
    host = lab.host(name)
    if verb == "on":
        host.start()
        host.wait_booted()
    else:
        {"off": host.power_off, "reboot": host.reboot, "crash": host.crash}[verb]()


@testbed.command(context_settings=AS_IS)
@click.argument("name")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.pass_obj
def ssh(lab: Lab, name: str, command: Sequence[str]) -> None:
    """Log in to a host as `ops`, its host key checked."""
    _become(lab.command(["ssh", "-F", lab.ssh_config, lab.host(name).name, *command]))


@testbed.command("exec", context_settings=AS_IS)
@click.argument("name")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.pass_obj
def execute(lab: Lab, name: str, command: Sequence[str]) -> None:
    """Run a command in a host as root, past ssh and past its link."""
    _become(lab.host(name).command(command, env={"TERM": os.environ.get("TERM", "dumb")}))


@testbed.command(context_settings=AS_IS)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.pass_obj
def run(lab: Lab, command: Sequence[str]) -> None:
    """Run a command of this machine in the lab's network: ansible-playbook, launch, ping."""
    _become(lab.command(command))


@testbed.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.pass_obj
def inventory(lab: Lab, file: Path) -> None:
    """Write an Ansible inventory to FILE: every host a CPU worker, the first one coordinates.

    Without a share, since NFS needs more than every kernel has: files travel by rsync.
    """
    if not lab.hosts:
        raise LabError(f"{lab.folder}: no hosts to write down; python -m tests.testbed up")
    first = next(iter(lab.hosts))
    settings = {"share_mode": "rsync", "motley_devices": [{"backend": "cpu"}]}
    lab.write_inventory(file, settings, {first: {"motley_coordinator": True}})


@testbed.command("image")
@click.argument("suites", nargs=-1, type=click.Choice(list(SUITES)))
@click.option("--rebuild", is_flag=True, help="Make it again, with today's packages.")
def make_image(suites: Sequence[str], rebuild: bool) -> None:
    """Make the images (all by default) and show where they are."""
    for suite in suites or SUITES:
        click.echo(str(image(suite, rebuild)))


def _become(command: list[str]) -> None:
    sys.stdout.flush()
    os.execvp(command[0], command)


def main() -> int:
    """Run the command line; one line for every error."""
    try:
        testbed.main(standalone_mode=False, prog_name="python -m tests.testbed")
    except (LabError, click.ClickException) as error:
        text = error.format_message() if isinstance(error, click.ClickException) else str(error)
        click.echo(f"testbed: {text}", err=True)
        return 1
    except (click.Abort, KeyboardInterrupt):
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
