"""The options of the commands that generate text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from trainer.system.commandline.number import Number

_Command = TypeVar("_Command", bound=Callable[..., Any])


def sampling_options(max_new_tokens: int) -> Callable[[_Command], _Command]:
    """Return a decorator that adds --max-new-tokens, --temperature, --top-k, --top-p and --seed."""
    options = (
        click.option(
            "--max-new-tokens",
            type=click.IntRange(min=1),
            default=max_new_tokens,
            show_default=True,
        ),
        click.option(
            "--temperature",
            type=Number(),
            default=0.0,
            show_default=True,
            help="0 selects the most likely token.",
        ),
        click.option("--top-k", type=int, help="Sample from this many of the most likely tokens."),
        click.option(
            "--top-p",
            type=Number(),
            help="Sample from the most likely tokens of this total probability.",
        ),
        click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True),
    )

    def add(command: _Command) -> _Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add
