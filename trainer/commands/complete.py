"""Completion of values: presets and the keys of settings. Never fails."""

from __future__ import annotations

import click
from click.shell_completion import CompletionItem


def presets(
    _context: click.Context, _parameter: click.Parameter, text: str
) -> list[CompletionItem]:
    """Offer the shipped run configs, and files."""
    from trainer.config import run

    named = [CompletionItem(name) for name in run.presets() if name.startswith(text)]
    return [CompletionItem(text, type="file"), *named]


def settings(_context: click.Context, _parameter: click.Parameter, text: str) -> list[str]:
    """Offer the keys of a run config, for KEY=VALUE."""
    from trainer.config import run

    return [f"{key}=" for key in run.setting_keys() if key.startswith(text)]
