"""`trainer merge`: merge an adapter into its base."""

from __future__ import annotations

from pathlib import Path

import click

from trainer.system.commandline.options import PATH


@click.command("merge")
@click.argument("adapter", type=PATH)
@click.option(
    "-o", "--output", type=PATH, required=True, help="Folder to write the merged model to."
)
@click.option("--base", help="The base model, if not at the adapter's stored path.")
def merge(adapter: Path, output: Path, base: str | None) -> None:
    """Merge ADAPTER (or an output folder, or a checkpoint) into its base model."""
    from trainer.checkpoint.adapter import open_adapter
    from trainer.checkpoint.merge_lora import describe_left_out
    from trainer.checkpoint.merge_lora import merge_adapter as write
    from trainer.system.process.slow_log import log_if_slow

    with log_if_slow("merging"):
        opened, lines = open_adapter(adapter, base)
        for line in (*lines, *filter(None, [describe_left_out(opened)])):
            click.echo(line, err=True)
        folder = write(opened, output)
    click.echo(folder)
