"""The types of a command for notifications, and of the trackers that get a run's figures."""

from __future__ import annotations

import shlex
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

Tracker = Literal["tensorboard", "trackio", "wandb", "mlflow"]


def _split_command(value: Any) -> Any:
    """Split a text as a shell does; nothing in it is ever run by a shell."""
    if not isinstance(value, str):
        return value
    try:
        return shlex.split(value)
    except ValueError as error:
        raise ValueError(f"cannot be split into words: {str(error).lower()}") from None


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Command = Annotated[tuple[str, ...], BeforeValidator(_split_command), Field(min_length=1)]
"""A program and its arguments: a list, or one text."""
Trackers = Annotated[tuple[Tracker, ...], BeforeValidator(_as_list)]
"""Names of trackers; one name alone is a list of it."""
