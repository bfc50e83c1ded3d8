"""`trainer compare`: compare Motley's exchange with other ways to sum gradients."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from trainer.system.commandline.number import Number
from trainer.system.errors import InputError

if TYPE_CHECKING:
    from benchmarks.compare.comparison import Comparison


@click.group("compare")
def compare() -> None:
    """Compare Motley with other programs."""


@compare.command("backends")
@click.option(
    "--backend",
    "names",
    type=click.Choice(["ours", "gloo", "nccl", "mpi"]),
    multiple=True,
    help="May be repeated; default: all.",
)
@click.option(
    "--megabytes",
    type=Number(0.01, 10_000),
    multiple=True,
    default=[5.3],
    help="Of the fp32 gradient; may be repeated.",
)
@click.option(
    "--rate",
    "rates",
    type=click.IntRange(1, 100_000),
    multiple=True,
    metavar="MBIT",
    help="Mbit/s of every link between simulated hosts, may be repeated; default: loopback.",
)
@click.option("--workers", type=click.IntRange(2, 16), default=3)
@click.option("--steps", type=click.IntRange(2, 1000), default=10)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def backends(
    names: tuple[Any, ...],
    megabytes: tuple[float, ...],
    rates: tuple[int, ...],
    workers: int,
    steps: int,
    as_json: bool,
) -> None:
    """Sum the same gradient, and train the same steps, by Motley's star, gloo, NCCL and MPI."""
    try:
        from benchmarks.compare import comparison
    except ModuleNotFoundError as error:
        if error.name not in ("benchmarks", "benchmarks.compare"):
            raise
        raise InputError(
            "trainer compare: its measurements stand beside the benchmarks, which no wheel has; run"
            " it in a checkout of Motley"
        ) from None
    from benchmarks.compare.backends import BACKENDS
    from benchmarks.compare.cluster import end_on_terminate

    end_on_terminate()
    comparison.check_network(rates)
    rows: list[comparison.Row] = []
    for row in comparison.compare(names or list(BACKENDS), megabytes, rates, workers, steps):
        rows.append(row)
        click.echo(f"measured {len(rows)}: {BACKENDS[row.backend].title}", err=True)
    found = comparison.Comparison(workers, steps, rows)
    if as_json:
        click.echo(json.dumps(found.as_json()))
    else:
        _print(found)


def _print(found: Comparison) -> None:
    from trainer.system.commandline.table import table

    measured = [row.cells() for row in found.rows if row.absent is None]
    click.echo(f"{found.workers} workers, medians of {found.steps} sums and {found.steps} steps")
    for line in table(measured) if measured else ():
        click.echo(line)
    for reason in dict.fromkeys(row.absent for row in found.rows if row.absent is not None):
        click.echo(f"not measured: {reason}")
