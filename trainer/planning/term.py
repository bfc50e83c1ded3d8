"""One number of a plan, with the formula and the source that it comes from."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import CodeType


@dataclass(frozen=True)
class Term:
    """A value with its formula; `launch plan --explain` prints it with the numbers put in."""

    name: str
    value: float
    formula: str
    """In Python's operators over the names of `numbers`."""
    numbers: Mapping[str, float]
    source: str

    @property
    def with_numbers(self) -> str:
        """The formula with its numbers put in."""

        def put_in(found: re.Match[str]) -> str:
            number = self.numbers.get(found[0])
            return found[0] if number is None else _format_short(number)

        return re.sub(r"[A-Za-z_]\w*", put_in, self.formula)


def term(name: str, formula: str, source: str, **numbers: float) -> Term:
    """Return a term with the value of its formula; `numbers` are those of the names in it."""
    # No text of a user or of a host is evaluated.
    value = eval(_compile_formula(formula), {}, numbers)  # noqa: S307 - formulas are our own literals
    return Term(name, float(value), formula, numbers, source)


@functools.cache
def _compile_formula(formula: str) -> CodeType:
    return compile(formula, "formula", "eval")


def _format_short(number: float) -> str:
    return f"{int(number):,}" if number == int(number) else f"{number:.6g}"
