"""The results of an experiment, with the source of each formula, as lines and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Value = str | int | float | None
"""None where it is not known."""
Row = dict[str, Value]


@dataclass(frozen=True)
class Formula:
    """A formula, and where it comes from."""

    text: str
    source: str


@dataclass(frozen=True)
class Experiment:
    """A table of computed or measured figures."""

    name: str
    title: str
    rows: Sequence[Mapping[str, Value]]
    """All with the same keys, which are the columns' titles."""
    formulas: Sequence[Formula]
    notes: Sequence[str] = ()

    def iter_lines(self) -> Iterator[str]:
        """Yield the experiment as text for people."""
        yield self.title
        yield ""
        yield from format_table(self.rows)
        yield ""
        for formula in self.formulas:
            yield f"{formula.text}   [{formula.source}]"
        yield from self.notes

    def as_json(self) -> dict[str, Any]:
        """Return the experiment as `motley.lab/1`."""
        return {
            "schema": "motley.lab/1",
            "experiment": self.name,
            "rows": [dict(row) for row in self.rows],
            "formulas": [vars(formula) for formula in self.formulas],
            "notes": list(self.notes),
        }


def format_table(rows: Sequence[Mapping[str, Value]]) -> Iterator[str]:
    """Yield the lines of rows, all with the same keys, which are the columns' titles.

    The first column is to the left, figures are to the right.
    """
    columns = list(rows[0])
    cells = [columns, *([_format_value(row[column]) for column in columns] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        first, *rest = (
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        yield "  ".join([first, *rest]).rstrip()


def _format_value(value: Value) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else value
