"""The option type for a run's id, and the id's form, the same in both programs."""

from __future__ import annotations

import re
from typing import Any

import click

RUN_ID = r"[a-z0-9][a-z0-9._-]{0,127}"
"""The form of a run id, which becomes part of paths and of units' names: that of a config's `name`,
but longer, since the launcher adds a time to the name."""


class RunId(click.ParamType[str]):
    """A run's id."""

    name = "id"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the id."""
        if not re.fullmatch(RUN_ID, value):
            self.fail(
                f"{value!r} is not a run's name: lower-case letters, digits and . _ -, a letter or"
                " digit first, 128 at most.",
                param,
                ctx,
            )
        return value
