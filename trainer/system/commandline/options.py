"""Options of both programs: the type of a path, and several options as one decorator."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

PATH = click.Path(path_type=Path)
"""The type of an option whose value is a Path."""

Command = TypeVar("Command", bound=Callable[..., Any])


def combine_options(*options: Callable[[Any], Any]) -> Callable[[Command], Command]:
    """Return a decorator that adds some options, in this order."""

    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


notify_option = click.option(
    "--notify",
    metavar="COMMAND",
    help="Command that receives the run's events; default: that of "
    "~/.config/motley/notify.yaml; '': none.",
)
"""The operator's command for notifications; `config.notify_command` reads it."""
