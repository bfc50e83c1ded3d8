"""`launch spend` and `launch budget`: show spending, and run any command under the budget guard."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from launcher.commands import completion
from launcher.commands.options import Currency, cluster_options, inventory_option, json_option
from trainer.system.commandline.number import Number

if TYPE_CHECKING:
    from launcher.runs.cluster import Cluster

PRICE, ABOVE = Number(min=0), Number(min=0, min_open=True)


@click.command()
@inventory_option
@click.option(
    "--by",
    type=click.Choice(["run", "host", "day"]),
    default="run",
    show_default=True,
    help="Grouping of the lines; days are in UTC.",
)
@click.option(
    "--run", "run_id", metavar="ID", shell_complete=completion.run_ids, help="Only this run."
)
@json_option
def spend(cluster: Cluster, by: Any, run_id: str | None, as_json: bool) -> None:
    """Show what runs and guarded commands have cost, by run, host or day (UTC)."""
    from launcher.runs.budget.spending import read_spend, sum_spend
    from launcher.terminal import note
    from launcher.views import render

    records = [
        r
        for r in read_spend(cluster.find_runs_registry(), note, waits=True)
        if run_id is None or r.run_id == run_id
    ]
    found = sum_spend(records, by)
    if as_json:
        tree = {"by": by, "totals": [asdict(total) for total in found]}
        render.print_json({"schema": "motley.spend/2", **tree})
        return
    if not found:
        render.print_line("nothing has been recorded; docs/budget.md explains how to set prices")
        return
    render.make_console().print(render.spend_table(found, by, render.terminal_width()))


@click.command(context_settings={"allow_interspersed_args": False})
@cluster_options
@click.option("--ceiling", type=ABOVE, metavar="MONEY", help="Default: $MOTLEY_BUDGET_CEILING.")
@click.option(
    "--currency",
    type=Currency(),
    metavar="CODE",
    help="E.g. EUR; default: $MOTLEY_BUDGET_CURRENCY.",
)
@click.option("--price-hour", type=PRICE, metavar="MONEY", help="Rent of this machine per hour.")
@click.option("--watts", type=ABOVE, help="Its power under load, if it cannot be measured.")
@click.option(
    "--price-kwh",
    type=PRICE,
    metavar="MONEY",
    help="Price of a kWh, for the measured or given watts.",
)
@click.option("--name", help="Name of its record; commands with the same name share one ceiling.")
@click.option(
    "--grace", type=Number(min=0), default=30.0, help="Seconds between SIGTERM and SIGKILL."
)
@click.argument("command", nargs=-1, required=True, metavar="-- COMMAND")
def budget(
    cluster: Cluster,
    ceiling: float | None,
    currency: str | None,
    name: str | None,
    grace: float,
    command: tuple[str, ...],
    **rate: float | None,
) -> None:
    """Run a command and stop it before it costs more than a ceiling.

    The cost is that of this machine, given by flags, or of the hosts of an inventory. Exits as
    the command does, or with 7 if the command was stopped.
    """
    from launcher.runs.budget.guarded_command import command_budget, run_guarded

    hosts = () if cluster.inventory is None else cluster.hosts
    budget = command_budget(hosts, rate, ceiling, currency, os.environ)
    click.get_current_context().exit(run_guarded(command, budget, name, grace))
