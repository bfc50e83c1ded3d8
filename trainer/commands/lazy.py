"""Groups of commands that list themselves without importing any."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


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

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Print the help when nothing is asked for: that is no mistake."""
        if not args and not ctx.resilient_parsing:
            click.echo(ctx.get_help())
            ctx.exit()
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that is meant.

        Raises:
            UsageError: there is none of this name; the message has the nearest ones.
        """
        name = args[0]
        if name in self._summaries or name.startswith("-") or ctx.resilient_parsing:
            return super().resolve_command(ctx, args)
        from difflib import get_close_matches

        names = {path: path.rpartition(" ")[2] for path in self.paths(ctx, ctx.command_path)}
        near = get_close_matches(name, set(names.values()), n=1)
        meant = ", ".join(path for path, last in names.items() if last in near)
        hint = f"; did you mean: {meant}" if meant else ""
        raise click.UsageError(f"no command '{name}'{hint}", ctx)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Offer the commands from the table, importing none of them."""
        from click.shell_completion import CompletionItem

        named = [
            CompletionItem(name, help=text)
            for name, text in self._summaries.items()
            if name.startswith(incomplete)
        ]
        return [*named, *click.Command.shell_complete(self, ctx, incomplete)]

    def paths(self, ctx: click.Context, prefix: str) -> list[str]:
        """Return how every command below is called; imports them."""
        found: list[str] = []
        for name in self.list_commands(ctx):
            command = self.get_command(ctx, name)
            found.append(f"{prefix} {name}")
            if isinstance(command, LazyGroup):
                found += command.paths(ctx, found[-1])
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands without importing any."""
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl(list(self._summaries.items()))
