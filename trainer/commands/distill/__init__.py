"""`trainer distill`: from a big model's logits to a small model."""

from __future__ import annotations

import click

from trainer.commands.lazy import LazyGroup

COMMANDS = {
    "teacher": "Score a corpus with a teacher: logits as sharded Parquet.",
    "student": "Train a student on a teacher's logits, also while they are written.",
    "trim-tokenizer": "Take out of a tokenizer what a corpus does not need.",
    "inspect": "Show what a folder of logits holds.",
    "verify": "Check every byte of it, and that each document is there once.",
    "audit": "Score a part again and compare with what was stored.",
}


@click.group(cls=LazyGroup, package="trainer.commands.distill", summaries=COMMANDS)
def distill() -> None:
    """Train a small model on what a big one says."""
