"""`trainer inspect-data`: what a data file holds, and what a model would learn of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trainer.system.commandline.options import PATH

if TYPE_CHECKING:
    from rich.console import Console

    from trainer.data.inspection import Inspection

_WIDTH = 40  # of a bar
_SHOWN = 1500  # characters of a sample


@click.command("inspect-data")
@click.argument("file", type=PATH)
@click.option("--model", metavar="DIR|NAME", help="The model whose tokens are counted.")
@click.option("--validation", type=click.Path(), help="Held-out data to compare.")
@click.option(
    "--task", type=click.Choice(["classify", "causal-lm", "dpo"]), help="Default: by the data."
)
@click.option(
    "--max-seq-len", type=click.IntRange(min=1), help="Tokens; default: as a run would take."
)
@click.option(
    "--samples",
    type=click.IntRange(min=0),
    default=5,
    help="Samples to show as the model sees them.",
)
@click.option("--set", "settings", metavar="KEY=VALUE", multiple=True, help="Any other setting.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def inspect_data(
    file: Path,
    model: str | None,
    settings: tuple[str, ...],
    samples: int,
    as_json: bool,
    **flags: Any,
) -> None:
    """Show what FILE holds: shapes, classes, tokens, repetitions, and samples with what is learned.

    Settings that are not given are those that a run derives from the data.
    """
    from trainer.commands.run_options import collect_overrides
    from trainer.config.run import load_config
    from trainer.data.encoder import Encoder
    from trainer.data.inspection import inspect_data
    from trainer.data.labelling import with_names
    from trainer.model.class_names import read_class_names
    from trainer.model.files import resolve_model
    from trainer.model.safetensors_headers import read_config
    from trainer.planning.defaults import derive_settings, provisional_settings
    from trainer.system.process.slow_log import log_if_slow

    given = collect_overrides(flags, {"task": "task"}, settings)
    paths = {"model.path": model or "none", "data.train": str(file)}
    config = load_config(None, paths | provisional_settings(paths | given) | given)
    folder = resolve_model(model) if model is not None else None
    found = {part.key: part.value for part in derive_settings(config, given, folder, ())}
    config = config.with_settings(found)
    config = with_names(config, read_class_names(read_config(folder)) if folder else ())
    encoder = Encoder(folder, config.data.lost_text, config.data.date) if folder else None
    with log_if_slow("measuring the data"):
        inspection = inspect_data(config, encoder, samples)
    if as_json:
        click.echo(json.dumps(inspection.as_json(), ensure_ascii=False))
        return
    from rich.console import Console

    _print(inspection, Console(soft_wrap=True, highlight=False))


def _print(found: Inspection, console: Console) -> None:
    from rich.text import Text

    for line in found.iter_lines():
        console.print(line, markup=False)
    if found.measurement is not None:
        most = max(count for _, count in found.measurement.build_histogram())
        console.print("samples by their tokens:")
        for limit, count in found.measurement.build_histogram():
            bar = "█" * -(-_WIDTH * count // most)
            console.print(f"  up to {limit:>9,}  {count:>9,}  {bar}".rstrip())
    coloured = console.color_system is not None and not console.no_color
    if any(piece.learned for example in found.examples for piece in example.spans):
        how = "green" if coloured else "between [[ and ]]"
        console.print(f"samples, with what is learned {how}:")
    for example in found.examples:
        text = Text()
        for piece in example.spans:
            marked = f"[[{piece.text}]]" if piece.learned and not coloured else piece.text
            text.append(marked, style="green" if piece.learned else "")
        more = len(text) - _SHOWN
        if more > 0:
            text = text[:_SHOWN].append(f" ... and {more:,} characters", style="dim")
        console.print(f"{example.location}" + (f" -> {example.label}" if example.label else ""))
        console.print(text)
