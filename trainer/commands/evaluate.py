"""`trainer evaluate`: figures of a trained model on a data file."""

from __future__ import annotations

import json
from pathlib import Path

import click

from trainer.config import Backend


@click.command("evaluate")
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--data", type=click.Path(path_type=Path), required=True, help="JSON Lines.")
@click.option("--base", help="The base model of an adapter, when it is not where it was.")
@click.option(
    "--gpu-backend",
    "backend",
    type=click.Choice(["auto", "cuda", "wgpu", "cpu"]),
    default="auto",
    show_default=True,
)
@click.option("--gpu", default="", help="Index, UUID, PCI address or name; default: the first.")
@click.option("--threads", type=click.IntRange(min=1), help="CPU threads.")
@click.option("--max-seq-len", type=click.IntRange(min=1), help="Tokens; default: as trained.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def evaluate(
    model: Path,
    data: Path,
    base: str | None,
    backend: Backend,
    gpu: str,
    threads: int | None,
    max_seq_len: int | None,
    as_json: bool,
) -> None:
    """Evaluate MODEL: an output folder, a checkpoint, an adapter or a full model."""
    from trainer.scoring import score
    from trainer.trained import load_trained

    trained = load_trained(model, base, max_seq_len)

    def on_open(device: str, reason: str) -> None:
        why = f" ({reason})" if reason else ""
        click.echo(f"evaluating {trained.path} on {device}{why}", err=True)

    scores = score(trained, data, backend, gpu, threads, on_open=on_open)
    if as_json:
        click.echo(json.dumps(scores.as_json()))
        return
    figures = (
        f"{name} {value:.4f}"
        for name in ("loss", "accuracy", "mcc", "perplexity")
        if (value := getattr(scores, name)) is not None
    )
    click.echo(f"{', '.join(figures)} on {scores.count} samples")
    if scores.confusion is not None:
        click.echo("rows are labels, columns predictions:")
        for label, row in enumerate(scores.confusion):
            click.echo(f"{label:>3} " + " ".join(f"{count:>6}" for count in row))
