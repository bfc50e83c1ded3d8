"""What an experiment found, with the source of each formula, as lines and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Value = str | int | float | None
"""None where this machine could not measure it."""
Row = dict[str, Value]


@dataclass(frozen=True)
class Formula:
    """A formula, and where it comes from."""

    text: str
    source: str


@dataclass(frozen=True)
class Experiment:
    """A table of what was computed or measured."""

    name: str
    title: str
    rows: Sequence[Mapping[str, Value]]
    """All with the same keys, which are the columns' titles."""
    formulas: Sequence[Formula]
    notes: Sequence[str] = ()

    def lines(self) -> Iterator[str]:
        """Yield the experiment as text for people."""
        yield self.title
        yield ""
        columns = list(self.rows[0])
        table = [columns, *([_shown(row[column]) for column in columns] for row in self.rows)]
        widths = [max(map(len, cells)) for cells in zip(*table, strict=True)]
        for cells in table:
            first, *rest = (
                cell.ljust(width) if index == 0 else cell.rjust(width)
                for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
            )
            yield "  ".join([first, *rest]).rstrip()
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


def _shown(value: Value) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else value
