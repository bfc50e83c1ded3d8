"""Option types for numbers: what is no finite number, or too large, is refused by its name."""

from __future__ import annotations

import math
import os
from typing import Any

import click

THREADS_PER_PROCESSOR = 4
"""More threads than this only wait for each other."""


class Number(click.FloatRange):
    """A finite number in a range: `inf`, `nan` and what overflows are refused."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return number

    def _describe_range(self) -> str:
        """Return the range for the help: none for any number."""
        return "" if self.min is None and self.max is None else super()._describe_range()


class Threads(click.IntRange):
    """Threads of one process on this host."""

    def __init__(self) -> None:
        super().__init__(min=1)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number."""
        threads = super().convert(value, param, ctx)
        processors = os.cpu_count() or 1
        if threads > THREADS_PER_PROCESSOR * processors:
            noun = "processor" if processors == 1 else "processors"
            self.fail(f"{threads} threads; this host has {processors} {noun}.", param, ctx)
        return threads
