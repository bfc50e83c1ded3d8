"""`trainer distill`: from a big model's logits to a small model."""

from __future__ import annotations

import click

from trainer.system.commandline.lazy_group import LazyGroup

_HERE = "trainer.commands.distill"
COMMANDS = {
    "teacher": (
        f"{_HERE}.teacher:teacher",
        "Score a corpus with a teacher: logits as sharded Parquet.",
    ),
    "generate": (
        f"{_HERE}.generate:generate",
        "Continue prompts with a teacher: answers as sharded Parquet, which is data.",
    ),
    "student": (
        f"{_HERE}.student:student",
        "Train a student on a teacher's logits, also while they are written.",
    ),
    "trim-tokenizer": (
        f"{_HERE}.trim_tokenizer:trim_tokenizer",
        "Remove the tokens that a corpus does not need.",
    ),
    "inspect": (f"{_HERE}.inspect:inspect", "Show the contents of a folder of logits."),
    "verify": (f"{_HERE}.verify:verify", "Check every byte, and that each document occurs once."),
    "audit": (f"{_HERE}.audit:audit", "Score a part again and compare with what was stored."),
}


@click.group(cls=LazyGroup, commands_at=COMMANDS)
def distill() -> None:
    """Train a small model on a large model's predictions."""
