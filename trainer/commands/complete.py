"""What a shell is offered for values: presets and the keys of settings. Never fails."""

from __future__ import annotations

import click
from click.shell_completion import CompletionItem


def presets(
    _context: click.Context, _parameter: click.Parameter, text: str
) -> list[CompletionItem]:
    """Offer the shipped run configs, and files."""
    from trainer import config

    named = [CompletionItem(name) for name in config.presets() if name.startswith(text)]
    return [CompletionItem(text, type="file"), *named]


def settings(_context: click.Context, _parameter: click.Parameter, text: str) -> list[str]:
    """Offer the keys of a run config, for KEY=VALUE."""
    from trainer import config

    return [f"{key}=" for key in config.setting_keys() if key.startswith(text)]
