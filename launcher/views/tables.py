"""Tables that fit the terminal: the least important columns are dropped, and no word is broken."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from launcher.terminal import sanitize_text

_GAP = 2
COLOURS = {
    "ok": "green",
    "warn": "yellow",
    "fail": "red",
    "running": "green",
    "active": "green",
    "completed": "green",
    "exited": "green",
    "starting": "cyan",
    "joining": "cyan",
    "rejoining": "cyan",
    "stopping": "cyan",
    "idle": "yellow",
    "backoff": "yellow",
    "recovering": "yellow",
    "lost": "red",
    "failed": "red",
    "unreachable": "red",
    "unknown": "red",
}
"""Colours of what checks, processes, members and runs are."""


@dataclass(frozen=True)
class Column:
    """One column of a table."""

    name: str
    spare: int = 0
    """Where there is no room, columns are left out from the highest number on; 0 stays."""
    least: int | None = None
    """Characters to which it may shrink; None keeps it whole."""
    words: bool = False
    """Whether a cell that is too long wraps after a word; else `…` ends it."""
    right: bool = False


def make_table(
    columns: Sequence[Column], rows: Iterable[Sequence[str | Text]], width: int | None
) -> Table:
    """Return a plain table of at most `width` characters; None is as wide as its cells.

    A column after the first that says nothing in any row, or a dash in all, is left out.
    """
    texts = [[_cell_text(cell) for cell in row] for row in rows]
    full = [
        max(cell_len(column.name), *(cell_len(row[index].plain) for row in texts), 0)
        for index, column in enumerate(columns)
    ]
    least = [
        _least_width(column, full[index], index, texts) for index, column in enumerate(columns)
    ]
    chosen = [
        index
        for index in range(len(columns))
        if not (index and texts) or any(row[index].plain not in ("", "-") for row in texts)
    ]
    if width is not None:
        while sum(least[i] + _GAP for i in chosen) - _GAP > width:
            spare = max(chosen, key=lambda i: columns[i].spare)
            if not columns[spare].spare:
                break
            chosen.remove(spare)
    sizes = _divide_width(chosen, full, least, width)
    result = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, header_style="bold")
    for index in chosen:
        column = columns[index]
        result.add_column(
            column.name,
            width=sizes[index],
            justify="right" if column.right else "left",
            no_wrap=not column.words,
            overflow="fold" if column.words else "ellipsis",
        )
    for row in texts:
        result.add_row(*(row[index] for index in chosen))
    return result


def _cell_text(cell: str | Text) -> Text:
    return cell if isinstance(cell, Text) else Text(sanitize_text(cell))


def _least_width(column: Column, full: int, index: int, texts: Sequence[Sequence[Text]]) -> int:
    least = full if column.least is None else min(full, max(column.least, cell_len(column.name)))
    if not column.words:
        return least
    words = (word for row in texts for word in row[index].plain.split())
    return max(least, max(map(cell_len, words), default=0))


def _divide_width(
    chosen: Sequence[int], full: Sequence[int], least: Sequence[int], width: int | None
) -> dict[int, int]:
    """Return the characters of each column: what is over goes to the one that lacks most."""
    if width is None:
        return {index: full[index] for index in chosen}
    sizes = {index: least[index] for index in chosen}
    left = width - sum(sizes.values()) - _GAP * (len(chosen) - 1)
    while left > 0:
        short = max(chosen, key=lambda i: full[i] - sizes[i])
        if sizes[short] == full[short]:
            break
        sizes[short] += 1
        left -= 1
    while left < 0 and max(sizes.values()) > 1:
        sizes[max(chosen, key=sizes.__getitem__)] -= 1
        left += 1
    return sizes
