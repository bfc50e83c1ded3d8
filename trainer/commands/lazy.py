"""Groups of commands that list themselves without importing any."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import click


class LazyGroup(click.Group):
    """Lists commands from their one-line summaries and imports only the one that runs.

    Args:
        package: where the commands live, one module each, named as they are with `_` for `-`.
        summaries: what each command does, by its name.
    """

    def __init__(self, *args: Any, package: str, summaries: Mapping[str, str], **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._package, self._summaries = package, summaries

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the commands' names."""
        del ctx
        return list(self._summaries)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command."""
        del ctx
        if cmd_name not in self._summaries:
            return None
        name = cmd_name.replace("-", "_")
        return getattr(importlib.import_module(f"{self._package}.{name}"), name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands without importing any."""
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl(list(self._summaries.items()))
