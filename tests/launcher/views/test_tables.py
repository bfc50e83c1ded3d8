"""Tables on terminals that are too narrow for them."""

import io
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text

from launcher.views.tables import Column, make_table

COLUMNS = (
    Column("NAME", least=6),
    Column("SAYS", words=True, least=8),
    Column("PID", spare=1, right=True),
    Column("PATH", spare=2),
)
ROWS: list[tuple[str | Text, ...]] = [
    ("worker-0", "idle: would slow the step", "4711", "/a/long/path/to/somewhere"),
    ("a-much-longer-name", Text("active", "green"), "1", "/b"),
]


def drawn(width: int | None, columns: Any = COLUMNS, rows: Any = ROWS) -> list[str]:
    console = Console(file=io.StringIO(), width=width or 500, force_terminal=False)
    console.print(make_table(columns, rows, width))
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_with_room_everything_is_there() -> None:
    assert drawn(None) == drawn(100)
    assert drawn(100) == [
        "NAME                SAYS                        PID  PATH",
        "worker-0            idle: would slow the step  4711  /a/long/path/to/somewhere",
        "a-much-longer-name  active                        1  /b",
    ]


def test_what_matters_least_gives_way_first() -> None:
    assert drawn(48) == [
        "NAME               SAYS                      PID",
        "worker-0           idle: would slow the     4711",
        "                   step",
        "a-much-longer-na…  active                      1",
    ]
    assert drawn(20) == [
        "NAME    SAYS",
        "worke…  idle: would",
        "        slow the",
        "        step",
        "a-muc…  active",
    ]


@pytest.mark.parametrize("width", range(8, 90))
def test_it_fits_and_breaks_no_word(width: int) -> None:
    lines = drawn(width)
    assert max(map(len, lines)) <= width
    if width >= 16:
        known = {word for row in ROWS for cell in row for word in str(cell).split()}
        words = {word for line in lines[1:] for word in line.split()}
        assert {word for word in words if not word.endswith("…")} <= known


def test_a_column_that_says_nothing_leaves_its_room_to_others() -> None:
    rows = [(name, says, "", path) for name, says, _, path in ROWS]
    assert drawn(70, rows=rows)[0].split() == ["NAME", "SAYS", "PATH"]
    dashes = [(name, says, "-", path) for name, says, _, path in ROWS]
    assert drawn(70, rows=dashes)[0].split() == ["NAME", "SAYS", "PATH"]
    assert drawn(None, rows=[("worker-0", "", "1", "")])[0].split() == ["NAME", "PID"]


def test_a_table_without_rows() -> None:
    assert drawn(80, rows=[]) == ["NAME  SAYS  PID  PATH"]
