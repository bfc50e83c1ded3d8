"""A Click group that imports a command when it is called, so that `--help` stays fast."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

FAMILIAR = {
    "attach": ("logs",),
    "eval": ("evaluate",),
    "fine-tune": ("finetune",),
    "infer": ("generate",),
    "kill": ("down",),
    "list": ("runs",),
    "ls": ("runs",),
    "predict": ("generate",),
    "ps": ("status", "runs"),
    "run": ("finetune", "up"),
    "start": ("up", "run"),
    "stop": ("down",),
    "submit": ("up",),
    "tail": ("logs",),
    "test": ("evaluate", "doctor"),
    "train": ("finetune", "up"),
    "watch": ("status",),
}
"""Names that other programs have for our commands."""


class LazyGroup(click.Group):
    """A group whose commands are `{name: (module:attribute, one-line help)}`."""

    def __init__(self, *, commands_at: Mapping[str, tuple[str, str]], **settings: Any) -> None:
        super().__init__(**settings)
        self._commands_at = commands_at

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        """Return the names in their given order."""
        return list(self._commands_at)

    def get_command(  # click's signature
        self,
        ctx: click.Context,  # noqa: ARG002 - click's signature
        cmd_name: str,
    ) -> click.Command | None:
        """Import and return one command; None for an unknown name."""
        if cmd_name not in self._commands_at:
            return None
        module, _, attribute = self._commands_at[cmd_name][0].partition(":")
        command: object = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Print the help if there are no arguments: that is no error."""
        if not args and not ctx.resilient_parsing:
            click.echo(ctx.get_help())
            ctx.exit()
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find a command by its name.

        Raises:
            UsageError: there is none; the message has the nearest names.
        """
        name = args[0]
        if name in self._commands_at or name.startswith("-") or ctx.resilient_parsing:
            return super().resolve_command(ctx, args)
        root = ctx.find_root()
        assert isinstance(root.command, LazyGroup)
        meant = self._find_near_names(ctx, name) or root.command._find_near_names(root, name)
        hint = f"; did you mean: {', '.join(meant)}" if meant else ""
        raise click.UsageError(f"no command '{name}'{hint}", ctx)

    def _find_near_names(self, ctx: click.Context, name: str) -> list[str]:
        from difflib import get_close_matches

        names = {
            path: path.rpartition(" ")[2] for path in self.list_full_names(ctx, ctx.command_path)
        }
        last = set(names.values())
        known = [meant for meant in FAMILIAR.get(name, ()) if meant in last]
        near = known or get_close_matches(name, last, n=1)
        return [path for path, last in names.items() if last in near]

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Offer the table's commands without importing them."""
        from click.shell_completion import CompletionItem

        named = [
            CompletionItem(name, help=text)
            for name, (_, text) in self._commands_at.items()
            if name.startswith(incomplete)
        ]
        return [*named, *click.Command.shell_complete(self, ctx, incomplete)]

    def list_full_names(self, ctx: click.Context, prefix: str) -> list[str]:
        """Return the full name of every command below; imports them."""
        found: list[str] = []
        for name in self.list_commands(ctx):
            command = self.get_command(ctx, name)
            found.append(f"{prefix} {name}")
            if isinstance(command, LazyGroup):
                found += command.list_full_names(ctx, found[-1])
        return found

    def format_commands(  # click's signature
        self,
        ctx: click.Context,  # noqa: ARG002 - click's signature
        formatter: click.HelpFormatter,
    ) -> None:
        """List the table's commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in self._commands_at.items()])
