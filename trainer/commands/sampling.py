"""The options of the commands that generate text."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import click

from trainer.commands.device_options import place_options
from trainer.config.limits import MOST_NEW_TOKENS
from trainer.system.commandline.number import Number
from trainer.system.commandline.options import PATH, combine_options

_Callback = Callable[..., None]


def generation_options(max_new_tokens: int) -> Callable[[_Callback], _Callback]:
    """Return a decorator that adds MODEL and what all commands that generate need.

    The command gets `model`, `base`, `max_new_tokens`, `sampling` (a `Sampling`) and `compute` (a
    `Compute`).
    """
    add = combine_options(
        click.argument("model", type=PATH),
        click.option(
            "--max-new-tokens",
            type=click.IntRange(1, MOST_NEW_TOKENS),
            default=max_new_tokens,
            help="Maximum number of tokens of an answer.",
        ),
        click.option(
            "--temperature", type=Number(), default=0.0, help="0 selects the most likely token."
        ),
        click.option("--top-k", type=int, help="Sample from this many of the most likely tokens."),
        click.option(
            "--top-p",
            type=Number(),
            help="Sample from the most likely tokens of this total probability.",
        ),
        click.option(
            "--seed",
            type=click.IntRange(min=0),
            default=0,
            help="Seed of the draws above temperature 0.",
        ),
        click.option("--base", help="The base model of an adapter, if it has moved."),
        place_options("auto", "cuda", "wgpu", "cpu", quantizes=True),
    )

    def decorate(command: _Callback) -> _Callback:
        @functools.wraps(command)
        def call(
            temperature: float, top_k: int | None, top_p: float | None, seed: int, **rest: Any
        ) -> None:
            from trainer.replica.sampling import Sampling

            command(sampling=Sampling(temperature, top_k, top_p, seed), **rest)

        return add(call)

    return decorate
