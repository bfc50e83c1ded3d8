"""`trainer generate-data`: generate realistic training data."""

from __future__ import annotations

from pathlib import Path

import click

from trainer.system.commandline.options import PATH

_Count = click.IntRange(min=1, max=1_000_000)


@click.command("generate-data")
@click.argument("kind", type=click.Choice(["shell-safety"]), expose_value=False)
@click.option("--count", type=_Count, default=12_000, help="Samples for training.")
@click.option(
    "--validation-count",
    type=_Count,
    default=600,
    help="Samples from templates that training never sees.",
)
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, help="Seed of the scripts that are drawn."
)
@click.option(
    "-o", "--output", type=PATH, required=True, help="Folder for train.jsonl and validation.jsonl."
)
def generate_data(
    count: int,
    validation_count: int,
    seed: int,
    output: Path,
) -> None:
    """Write training data; equal seeds give equal bytes.

    shell-safety: shell scripts in five safety classes.
    """
    from trainer.data.corpus import write_shell_safety

    folder = write_shell_safety(output, count, validation_count, seed)
    click.echo(f"{folder}: {count} training and {validation_count} validation scripts")
