"""`trainer generate`: continue prompts with a trained model."""

from __future__ import annotations

import json
from pathlib import Path

import click

from trainer.commands.place import open_ranks, parallel_option, place_options
from trainer.config.run import Backend
from trainer.system.commandline.number import Number


@click.command("generate")
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--prompt", "texts", multiple=True, help="A text to continue; may be repeated.")
@click.option("--data", type=click.Path(path_type=Path), help="Prompts as JSON Lines.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=128, show_default=True)
@click.option(
    "--temperature",
    type=Number(),
    default=0.0,
    show_default=True,
    help="0 selects the most likely token.",
)
@click.option("--top-k", type=int, help="Sample from this many of the most likely tokens.")
@click.option(
    "--top-p", type=Number(), help="Sample from the most likely tokens of this total probability."
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--base", help="The base model of an adapter, if it has moved.")
@place_options("auto", "cuda", "wgpu", "cpu")
@parallel_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for each prompt.")
def generate(
    model: Path,
    texts: tuple[str, ...],
    data: Path | None,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    seed: int,
    base: str | None,
    backend: Backend,
    gpu: str,
    threads: int | None,
    parallel: str | None,
    as_json: bool,
) -> None:
    """Continue texts with MODEL: an output folder, a checkpoint, an adapter or a full model.

    Lines of --data hold `text` or `messages`; the last answer of `messages` is generated again.
    """
    if bool(texts) == (data is not None):
        raise click.UsageError("give --prompt TEXT or --data FILE")
    from trainer.checkpoint.trained_model import load_trained
    from trainer.data.samples import read_prompts
    from trainer.data.shapes import Sample
    from trainer.evaluate.generation import complete
    from trainer.replica.sampling import Sampling

    sampling = Sampling(temperature, top_k, top_p, seed)
    with open_ranks(parallel, backend, gpu, threads) as ranks:
        samples = read_prompts(data) if data else [Sample(text) for text in texts]
        trained = load_trained(model, base)
        prints = ranks is None or ranks.leads

        def on_open(device: str, reason: str) -> None:
            why = f" ({reason})" if reason else ""
            if prints:
                click.echo(f"generating with {trained.path} on {device}{why}", err=True)

        completions = complete(
            trained,
            samples,
            max_new_tokens,
            sampling,
            backend,
            gpu,
            threads,
            on_open=on_open,
            opener=ranks and ranks.generator,
        )
    for completion in completions if prints else []:
        click.echo(json.dumps(completion.as_json()) if as_json else completion.text)
