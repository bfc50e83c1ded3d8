"""`trainer lab`: small experiments, each with real figures and the sources of its formulas."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from trainer.system.commandline.number import Number
from trainer.system.commandline.options import Command, combine_options

if TYPE_CHECKING:
    from trainer.lab.experiment import Experiment


@click.group("lab")
def lab() -> None:
    """Show single techniques with measured figures, offline and in seconds."""


def _add_options(
    *, steps: int | None = None, gradients: bool = False
) -> Callable[[Command], Command]:
    """Return a decorator that adds --json and --seed, and what else an experiment takes."""
    options = [click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")]
    options.append(
        click.option(
            "--seed",
            type=click.IntRange(0, 2**32 - 1),
            default=42,
            help="Seed of the drawn values.",
        )
    )
    if steps is not None:
        options.append(
            click.option(
                "--steps",
                type=click.IntRange(2, 1000),
                default=steps,
                help="Training steps, or updates of a gradient.",
            )
        )
    if gradients:
        for name, default, most, meaning in (
            ("--parameters", 1000, 10_000_000, "Values of each gradient."),
            ("--workers", 4, 100, "Workers whose gradients are averaged."),
        ):
            options.append(
                click.option(name, type=click.IntRange(1, most), default=default, help=meaning)
            )
    return combine_options(*reversed(options))


@lab.command("topk")
@click.option("--density", type=Number(), default=0.1, help="Fraction of the values that is kept.")
@_add_options(gradients=True)
def topk(density: float, parameters: int, workers: int, seed: int, as_json: bool) -> None:
    """Show how much of a gradient its largest values keep, and in how many bytes."""
    from trainer.lab.compression import top_k

    _print(top_k(seed, parameters, workers, density), as_json=as_json)


@lab.command("feedback")
@_add_options(steps=100, gradients=True)
def feedback(steps: int, parameters: int, workers: int, seed: int, as_json: bool) -> None:
    """Show how much of what lossy codecs drop is recovered by error feedback."""
    from trainer.lab import compression

    _print(compression.measure_feedback(seed, parameters, workers, steps), as_json=as_json)


@lab.command("zero")
@click.option(
    "--parameters",
    type=Number(1, 1e15),
    default=7e9,
    metavar="7e9",
    help="Parameters of the model.",
)
@click.option(
    "--devices", type=click.IntRange(1, 1_000_000), default=8, help="Devices that share the states."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def zero(parameters: float, devices: int, as_json: bool) -> None:
    """Show the memory of weights, gradients and optimizer states under each stage of ZeRO."""
    from trainer.lab import zero

    _print(zero.compare_zero_stages(parameters, devices), as_json=as_json)


@lab.command("precision")
@_add_options(steps=20)
def precision(steps: int, seed: int, as_json: bool) -> None:
    """Measure time, memory and loss of 16-bit products on this machine."""
    from trainer.lab import training

    _print(training.compare_precisions(seed, steps), as_json=as_json)


@lab.command("checkpointing")
@_add_options(steps=20)
def checkpointing(steps: int, seed: int, as_json: bool) -> None:
    """Measure time and memory of gradient checkpointing on this machine."""
    from trainer.lab import training

    _print(training.compare_checkpointing(seed, steps), as_json=as_json)


def _print(experiment: Experiment, *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(experiment.as_json()))
        return
    for line in experiment.iter_lines():
        click.echo(line)
