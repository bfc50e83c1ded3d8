"""One line for a wrong command line: what is wrong, and what is probably meant."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import click

from trainer.config.spelling import find_nearest_option, format_hint

ADVICE = {
    "bf16": "--set training.precision=bf16",
    "fp16": "--set training.precision=fp16",
    "logging_steps": "nothing: every step is in OUTPUT/metrics.jsonl",
    "report_to": "--set tracking=[tensorboard,wandb]; metrics are always in OUTPUT/metrics.jsonl",
    "resume_from_checkpoint": "the same -o again: a run resumes at its newest checkpoint",
    "save_steps": "--set checkpoint.every=VALUE",
    "save_total_limit": "--set checkpoint.keep_last=VALUE",
}
"""Options of other trainers, and what to give instead."""
_DASHES = "\u2010\u2011\u2012\u2013\u2014\u2015\u2212"
"""Characters to which word processors and web pages change a hyphen."""
_NO_NUMBER = re.compile(r"is not a valid (integer|float|number)(?: range)?\.")


def usage_line(
    error: click.ClickException, arguments: Sequence[str], keys: Callable[[list[str]], list[str]]
) -> str:
    """Return one line for click's error.

    Args:
        arguments: of the command line.
        keys: returns the settings that a command with these options takes with `--set`.
    """
    context = getattr(error, "ctx", None)
    message = _NO_NUMBER.sub(_reword_number, error.format_message())
    parameters = context.command.params if context else []
    options = [name for parameter in parameters for name in parameter.opts]
    dashed = next((word for word in arguments if re.match(f"-?[{_DASHES}]+[a-zA-Z]", word)), None)
    if dashed is not None:
        name = dashed.lstrip(f"-{_DASHES}")
        meant = f"-{name}" if len(name.partition("=")[0]) == 1 else f"--{name}"
        message = f"{dashed} begins with a dash that is not a hyphen; type {meant}"
    elif isinstance(error, click.NoSuchOption):
        advice = ADVICE.get(error.option_name.lstrip("-").replace("-", "_").lower())
        nearest = find_nearest_option(error.option_name, options, keys(options))
        instead = f"; give {advice}" if advice and "--set" in options else format_hint(nearest)
        message = f"no option {error.option_name}{instead}"
    elif "--config" in options and (file := re.search(r"argument \((\S+\.ya?ml)\)", message)):
        message = f"{message.rstrip('.')}; did you mean: --config {file[1]}"
    elif (word := re.search(r"argument \((\w+)\)", message)) and f"--{word[1]}" in options:
        message = f"{message.rstrip('.')}; did you mean: --{word[1]}"
    return f"{message} (see: {context.command_path} --help)" if context else message


def _reword_number(found: re.Match[str]) -> str:
    return "is not a whole number." if found[1] == "integer" else "is not a number."
