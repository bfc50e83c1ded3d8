"""The options of all commands that train: settings of a run config with their own flags."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click
from click.shell_completion import CompletionItem

from trainer.config.section import parse_assignments
from trainer.system.commandline.number import Number
from trainer.system.commandline.options import Command, combine_options, notify_option
from trainer.system.commandline.run_id import RunId


def _complete_presets(
    _context: click.Context, _parameter: click.Parameter, text: str
) -> list[CompletionItem]:
    """Offer the shipped run configs, and files."""
    from trainer.config import run as run_config

    named = [CompletionItem(name) for name in run_config.list_presets() if name.startswith(text)]
    return [CompletionItem(text, type="file"), *named]


def _complete_settings(
    _context: click.Context, _parameter: click.Parameter, text: str
) -> list[str]:
    """Offer the keys of a run config, for KEY=VALUE."""
    from trainer.config import run as run_config

    return [f"{key}=" for key in run_config.setting_keys() if key.startswith(text)]


_SETTINGS = {
    "method": "method",
    "output": "output",
    "validation": "data.validation",
    "max_seq_len": "data.max_seq_len",
    "epochs": "training.epochs",
    "max_steps": "training.max_steps",
    "batch_size": "training.batch_size",
    "learning_rate": "optimizer.learning_rate",
}


def run_options(unit: str, config: str | None = None) -> Callable[[Command], Command]:
    """Return a decorator that adds --config (as `source`), --set (as `settings`) and the flags of
    common settings.

    Args:
        unit: what a batch is made of.
        config: the default of --config.
    """
    return combine_options(
        click.option(
            "--config",
            "source",
            metavar="FILE|PRESET",
            shell_complete=_complete_presets,
            default=config,
            show_default=config is not None,
            help="A run config, or the name of a preset.",
        ),
        click.option(
            "--method",
            type=click.Choice(["lora", "full"]),
            help="Train adapters (lora) or all weights.",
        ),
        click.option(
            "--validation",
            type=click.Path(),
            metavar="PATH",
            help="Data of any format that is scored and not learned.",
        ),
        click.option("--max-seq-len", type=int, help=f"Tokens; longer {unit}s are cut."),
        click.option("--epochs", type=int, help="Passes over the data."),
        click.option("--max-steps", type=int, help="Number of steps; overrides --epochs."),
        click.option(
            "--batch-size", type=int, help=f"{unit.capitalize()}s a step, over all workers."
        ),
        click.option("--learning-rate", type=Number(), help="AdamW's peak rate, after warmup."),
        click.option(
            "-o",
            "--output",
            type=click.Path(),
            metavar="DIR",
            help="Folder for checkpoints, metrics and status.",
        ),
        click.option(
            "--set",
            "settings",
            metavar="KEY=VALUE",
            multiple=True,
            shell_complete=_complete_settings,
            help="Any other setting, e.g. --set lora.lora_rank=8.",
        ),
        click.option(
            "--run-id", type=RunId(), metavar="ID", help="Name of the run; the same id resumes it."
        ),
        notify_option,
    )


def collect_overrides(
    flags: Mapping[str, Any], own: Mapping[str, str], settings: Sequence[str]
) -> dict[str, Any]:
    """Return settings by their dotted paths; --set overrides flags.

    Args:
        own: the settings behind further flags of the command.

    Raises:
        InputError: a --set is not KEY=VALUE.
    """
    known = {**_SETTINGS, **own}
    given = {path: flags[flag] for flag, path in known.items() if flags.get(flag) is not None}
    return given | parse_assignments(settings, "--set")
