"""`trainer generate`: continue prompts with a trained model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from trainer.commands.device_options import (
    columns_option,
    make_announcer,
    open_ranks,
    parallel_option,
)
from trainer.commands.sampling import generation_options
from trainer.system.commandline.options import PATH

if TYPE_CHECKING:
    from trainer.replica.backend import Compute
    from trainer.replica.sampling import Sampling


@click.command("generate")
@click.option("--prompt", "texts", multiple=True, help="A text to continue; may be repeated.")
@click.option("--chat", "asked", multiple=True, help="A user's turn to answer; may be repeated.")
@click.option("--data", type=PATH, help="Prompts as data of any format.")
@columns_option
@generation_options(max_new_tokens=128)
@parallel_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for each prompt.")
def generate(
    model: Path,
    base: str | None,
    max_new_tokens: int,
    sampling: Sampling,
    compute: Compute,
    texts: tuple[str, ...],
    asked: tuple[str, ...],
    data: Path | None,
    columns: dict[str, str],
    parallel: str | None,
    as_json: bool,
) -> None:
    """Continue texts with MODEL: an output folder, a checkpoint, an adapter or a full model.

    --chat asks as the chat template does, --prompt continues the bare text. Lines of --data hold
    `text` or `messages`; the last answer of `messages` is generated again, or the one they lack.
    """
    if bool(texts or asked) == (data is not None):
        raise click.UsageError("give --prompt TEXT, --chat TEXT or --data FILE")
    if columns and data is None:
        raise click.UsageError("--column names keys of --data FILE")
    from trainer.checkpoint.trained_model import load_trained
    from trainer.data.samples import columns_of_run, read_prompts
    from trainer.data.shapes import Sample
    from trainer.data.turns import ChatMessage
    from trainer.evaluate.generation import complete_samples

    with open_ranks(parallel, compute) as ranks:
        samples = [Sample(text) for text in texts]
        samples += [Sample("", messages=(ChatMessage("user", text),)) for text in asked]
        trained = load_trained(model, base)
        if data is not None:
            columns = columns or columns_of_run(data, trained.config.data.columns)
            samples = read_prompts(data, columns)
        completions = complete_samples(
            trained,
            samples,
            max_new_tokens,
            sampling,
            compute,
            on_open=make_announcer("generating with", trained, ranks),
            opener=ranks and ranks.open_generator,
        )
    for completion in completions if ranks is None or ranks.leads else []:
        click.echo(json.dumps(completion.as_json()) if as_json else completion.text)
