"""The operator's command for notifications: it travels with one start, and no config holds it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from trainer.config.notifications import Command
from trainer.config.section import Section, build_settings, read_yaml
from trainer.system.errors import InputError
from trainer.system.process.notification import COMMAND_VARIABLE
from trainer.system.untrusted_data import parse_json


class _NotifyFile(Section):
    command: Command


def notify_file_path() -> Path:
    """Return the file of this user's command: `notify.yaml` in $XDG_CONFIG_HOME/motley."""
    base = Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config")
    if not base.is_absolute():  # as the specification of XDG_CONFIG_HOME says
        base = Path("~/.config")
    try:
        return base.expanduser() / "motley" / "notify.yaml"
    except RuntimeError:  # a user without a home
        return Path("/nonexistent")


def read_notify_command(given: str | None) -> tuple[str, ...]:
    """Return the command of a start; empty for none.

    It is `--notify`, else what a supervisor handed over, else that of `notify_file_path`.
    What was handed over is removed from the environment, so that no child sees it.

    Args:
        given: the value of `--notify`; empty means no command.

    Raises:
        InputError: the text cannot be split into words, or the file cannot be used or trusted.
    """
    handed = os.environ.pop(COMMAND_VARIABLE, None)
    if given is not None:
        return _build_command(given, "--notify") if given.strip() else ()
    if handed is not None:
        return _build_command(_parse_variable(handed), COMMAND_VARIABLE) if handed != "[]" else ()
    path = notify_file_path()
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return ()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(found.st_mode):
        raise InputError(f"{path}: not a regular file")
    if found.st_uid not in (0, os.getuid()) or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise InputError(f"{path}: other users can change this command; chown it, chmod go-w")
    return build_settings(_NotifyFile, read_yaml(path), {}, path).command


def _parse_variable(text: str) -> object:
    try:
        return parse_json(text, COMMAND_VARIABLE)
    except ValueError as error:
        raise InputError(f"{error}; give --notify COMMAND") from None


def _build_command(value: object, where: str) -> tuple[str, ...]:
    return build_settings(_NotifyFile, {"command": value}, {}, where).command
