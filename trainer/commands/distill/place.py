"""Where teachers and students compute: the options that they share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

_Command = TypeVar("_Command", bound=Callable[..., Any])


def place_options(command: _Command) -> _Command:
    """Add --gpu, --gpu-backend (as `backend`) and --threads; torch alone, no wgpu."""
    for option in (
        click.option("--threads", type=click.IntRange(min=1), help="CPU threads."),
        click.option(
            "--gpu-backend",
            "backend",
            type=click.Choice(["auto", "cuda", "cpu"]),
            default="auto",
            show_default=True,
        ),
        click.option(
            "--gpu",
            metavar="GPU",
            default="",
            help="One device: its index, UUID or PCI address.",
        ),
    ):
        command = option(command)
    return command
