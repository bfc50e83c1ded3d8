"""`trainer generate-data`: generate realistic training data, or convert a corpus to it."""

from __future__ import annotations

from pathlib import Path

import click
from click.core import ParameterSource

from trainer.system.commandline.together import PATH

_Count = click.IntRange(min=1, max=1_000_000)


@click.command("generate-data")
@click.argument("kind", type=click.Choice(["shell-safety", "meetings", "ami"]))
@click.option("--count", type=_Count, default=12_000, help="Samples for training.")
@click.option(
    "--validation-count",
    type=_Count,
    default=600,
    help="Samples from templates that training never sees.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0)
@click.option(
    "--from",
    "source",
    type=PATH,
    metavar="DIR",
    help="For ami: the unpacked manual annotations of the AMI corpus.",
)
@click.option(
    "-o", "--output", type=PATH, required=True, help="Folder for train.jsonl and validation.jsonl."
)
@click.pass_context
def generate_data(
    context: click.Context,
    kind: str,
    count: int,
    validation_count: int,
    seed: int,
    source: Path | None,
    output: Path,
) -> None:
    """Write training data; equal seeds give equal bytes.

    shell-safety: shell scripts in five safety classes. meetings: transcripts with minutes. ami:
    the same from the AMI Meeting Corpus.
    """
    from trainer.data import corpus

    if kind == "ami":
        if source is None:
            raise click.UsageError("ami: give --from DIR, the corpus' unpacked annotations")
        for option in ("count", "validation_count", "seed"):
            if context.get_parameter_source(option) != ParameterSource.DEFAULT:
                raise click.UsageError(f"ami: takes no --{option.replace('_', '-')}")
        folder, counts = corpus.write_ami(output, source)
        click.echo(
            f"{folder}: " + ", ".join(f"{n} {part}" for part, n in counts.items()) + " meetings"
        )
        return
    if source is not None:
        raise click.UsageError(f"{kind}: takes no --from")
    write, noun = {
        "shell-safety": (corpus.write_shell_safety, "scripts"),
        "meetings": (corpus.write_meetings, "meetings"),
    }[kind]
    folder = write(output, count, validation_count, seed)
    click.echo(f"{folder}: {count} training and {validation_count} validation {noun}")
