"""`trainer generate-data`: real-looking training data, made here."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("generate-data")
@click.argument("kind", type=click.Choice(["shell-safety"]))
@click.option(
    "--count", type=click.IntRange(min=1, max=1_000_000), default=12_000, show_default=True,
    help="Samples for training.",
)  # fmt: skip
@click.option(
    "--validation-count", type=click.IntRange(min=1, max=1_000_000), default=600,
    show_default=True, help="Samples from templates that training never sees.",
)  # fmt: skip
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), required=True,
    help="Folder for train.jsonl and validation.jsonl.",
)  # fmt: skip
def generate_data(kind: str, count: int, validation_count: int, seed: int, output: Path) -> None:
    """Write labelled shell scripts in five safety classes; equal seeds give equal bytes."""
    from trainer.data.corpus import write_shell_safety

    assert kind == "shell-safety"
    folder = write_shell_safety(output, count, validation_count, seed)
    click.echo(f"{folder}: {count} training and {validation_count} validation scripts")
