"""A table as lines of text: the first column to the left, figures to the right."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

Value = str | int | float | None
"""None where it is not known."""


def format_table(rows: Sequence[Mapping[str, Value]]) -> Iterator[str]:
    """Yield the lines of rows, all with the same keys, which are the columns' titles."""
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
