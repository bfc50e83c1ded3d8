"""`trainer init-model`: create a small model with random weights."""

from __future__ import annotations

from pathlib import Path

import click

from trainer.system.commandline.options import PATH


@click.command("init-model")
@click.option(
    "--data", type=PATH, required=True, help="Data of any format, to train the tokenizer on."
)
@click.option("-o", "--output", type=PATH, required=True, help="Folder to write the model to.")
@click.option("--seed", type=click.IntRange(min=0), default=0, help="Seed of the initial weights.")
@click.option("--hidden-size", type=int, default=None, help="Width of the residual stream.")
@click.option("--layers", type=int, default=None, help="Transformer layers.")
@click.option("--heads", type=int, default=None, help="Attention heads.")
@click.option(
    "--kv-heads", type=int, default=None, help="Key-value heads, shared by the query heads."
)
@click.option("--head-dim", type=int, default=None, help="Width of one head.")
@click.option("--intermediate-size", type=int, default=None, help="Width of the MLP.")
@click.option("--vocab-size", type=int, default=None, help="Maximum number of tokens.")
def init_model(data: Path, output: Path, seed: int, **sizes: int | None) -> None:
    """Create a small Qwen3 with a byte-level BPE tokenizer trained on the data."""
    from trainer.init_model import ModelSizes
    from trainer.init_model import init_model as make

    names = {"layers": "num_layers", "heads": "num_heads", "kv_heads": "num_kv_heads"}
    given = {names.get(name, name): value for name, value in sizes.items() if value is not None}
    click.echo(make(data, output, ModelSizes(**given), seed))
