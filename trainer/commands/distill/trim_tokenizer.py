"""`trainer distill trim-tokenizer`: keep the tokens that a corpus uses most."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from trainer.commands.device_options import corpus_options
from trainer.system.commandline.options import PATH


@click.command("trim-tokenizer")
@click.argument("tokenizer_dir", metavar="TOKENIZER", type=PATH)
@corpus_options(required=True)
@click.option(
    "--size", type=int, help="Tokens to keep. Default: 32768, or half of a smaller vocabulary."
)
@click.option("-o", "--output", type=PATH, required=True, help="The new tokenizer folder.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def trim_tokenizer(
    tokenizer_dir: Path,
    data: tuple[Path, ...],
    columns: dict[str, str],
    size: int | None,
    output: Path,
    as_json: bool,
) -> None:
    """Write a smaller TOKENIZER whose tokens all exist in the old one.

    TOKENIZER is a model folder or GGUF file with a byte-level BPE. All bytes and special tokens are
    kept, so any text can still be encoded; the other tokens are those that the data uses most.
    """
    from trainer.data.documents import Documents
    from trainer.distill.tokenizer.trim import trim_to_size
    from trainer.model.files import local_model

    folder = local_model(tokenizer_dir) or tokenizer_dir
    trimmed = trim_to_size(folder, Documents(data, columns), size, output)
    if as_json:
        tree = {"schema": "motley.trimming/2", "output": str(output), **asdict(trimmed)}
        click.echo(json.dumps(tree))
        return
    before, after = trimmed.corpus_teacher_tokens, trimmed.corpus_tokens
    rows = {
        "tokens": f"{trimmed.tokens:,} of {trimmed.teacher_tokens:,}",
        "corpus": f"{trimmed.documents:,} documents, {trimmed.characters:,} characters",
        "length": f"{after:,} tokens instead of {before:,} ({after / before - 1:+.2%})",
        "a token": f"{trimmed.characters / after:.2f} characters instead of"
        f" {trimmed.characters / before:.2f}",
        "coverage": f"{trimmed.covered_tokens / before:.2%} of the old tokens are kept",
        "output": str(output),
    }
    for name, text in rows.items():
        click.echo(f"{name:8}  {text}")
