"""Where a command computes: the options that all commands with one device share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from trainer.config.run import Backend

_Command = TypeVar("_Command", bound=Callable[..., Any])


def place_options(*backends: Backend) -> Callable[[_Command], _Command]:
    """Return a decorator that adds --gpu-backend (as `backend`), --gpu and --threads."""
    options = (
        click.option(
            "--gpu-backend",
            "backend",
            type=click.Choice(backends),
            default="auto",
            show_default=True,
            help="A named backend is required; auto takes the first that works.",
        ),
        click.option(
            "--gpu",
            metavar="GPU",
            default="",
            help="Index, UUID, PCI address or name of a required device; default: the first.",
        ),
        click.option("--threads", type=click.IntRange(min=1), help="CPU threads."),
    )

    def add(command: _Command) -> _Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add
