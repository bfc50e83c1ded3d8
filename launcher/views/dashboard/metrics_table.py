"""A run's metrics as one table, CSV or Parquet: a row a line, a column a key.

A value by rank becomes a column of each rank (`shares_0`), a list its JSON. Lines that a resumed
run made void are left out. The file is read twice, so that no table has to fit into memory.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Generator, Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal, cast

from launcher.errors import ConfigError
from launcher.hosts import ssh
from launcher.runs.processes.log_pages import line_pages
from launcher.runs.records.run import Run
from launcher.views.dashboard.history import METRICS_FILE
from trainer.system.received import parse, plain

Form = Literal["csv", "parquet"]
Value = int | float | str
Row = dict[str, Value]
_MOST_COLUMNS = 20_000
_ROWS = 10_000
"""Of a row group."""


def write_metrics(run: Run, path: Path, form: Form) -> None:
    """Write the metrics of a run.

    Raises:
        ConfigError: there are none, the file cannot be written, or pyarrow is missing.
        UnreachableError: the leader's host does not answer.
    """
    write = _write_csv if form == "csv" else _parquet_writer()
    connection = ssh.connect(run.head)
    plan = run.plan_by(run.head, connection) or run.plan
    source = f"{plan.output}/{METRICS_FILE}"

    def rows() -> Iterator[Row]:
        return _rows(lambda offset, limit: connection.read(source, offset, limit))

    try:
        columns, void, count = _survey(rows())
    except FileNotFoundError:
        raise ConfigError(f"run {run.run_id} has no metrics yet: {source} is missing") from None
    kept = (row for number, row in enumerate(islice(rows(), count)) if number not in void)
    fresh = path.with_name(f".{path.name}.tmp")
    try:
        write(fresh, columns, kept)
        fresh.replace(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror or error}") from None
    finally:
        fresh.unlink(missing_ok=True)


def _rows(read: Callable[[int, int], bytes]) -> Generator[Row]:
    for page in line_pages(read, 0, whole=False):
        for line in page.lines:
            try:
                tree: Any = parse(line, METRICS_FILE)
            except ValueError:
                continue
            if isinstance(tree, dict):
                yield dict(_flat(plain(cast("dict[str, Any]", tree))))


def _flat(tree: dict[str, Any]) -> Iterator[tuple[str, Value]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            inner = cast("dict[str, Any]", value)
            yield from _flat({f"{name}_{key}": part for key, part in inner.items()})
        elif isinstance(value, list):
            yield name, json.dumps(value, separators=(",", ":"))
        elif isinstance(value, int | float | str):
            yield name, value


def _survey(rows: Iterable[Row]) -> tuple[dict[str, type], set[int], int]:
    """Return the columns with their types, the numbers of void rows, and the number of rows."""
    columns: dict[str, type] = {}
    void: set[int] = set()
    steps: list[tuple[int, int]] = []
    """Numbers and steps of the rows that a later resumption can make void."""
    count = 0
    for number, row in enumerate(rows):
        count += 1
        for name, value in row.items():
            kind = columns.setdefault(name, type(value))
            if kind is not type(value):
                columns[name] = str if str in (kind, type(value)) else float
        if len(columns) > _MOST_COLUMNS:
            raise ConfigError(f"{METRICS_FILE} has more than {_MOST_COLUMNS:,} columns")
        step = row.get("step")
        if row.get("event") == "resumed" and isinstance(step, int):
            while steps and steps[-1][1] > step:
                void.add(steps.pop()[0])
        elif row.get("kind") != "event" and isinstance(step, int):
            steps.append((number, step))
    return columns, void, count


def _write_csv(path: Path, columns: dict[str, type], rows: Iterable[Row]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(columns))
        writer.writeheader()
        for row in rows:
            writer.writerow({name: _cell(value) for name, value in row.items()})


def _cell(value: Value) -> Value:
    """Return a value of CSV; a text that a spreadsheet would compute becomes plain text."""
    return f"'{value}" if isinstance(value, str) and value[:1] in "=+-@\t\r" and value else value


def _parquet_writer() -> Callable[[Path, dict[str, type], Iterable[Row]], None]:
    try:
        import pyarrow as pa  # pyright: ignore[reportMissingTypeStubs] - it has none
        from pyarrow import parquet  # pyright: ignore[reportMissingTypeStubs] - it has none
    except ModuleNotFoundError:
        raise ConfigError(
            "Parquet needs the package pyarrow: pip install pyarrow; --format csv needs nothing"
        ) from None
    arrow: Any = pa
    files: Any = parquet

    def write(path: Path, columns: dict[str, type], rows: Iterable[Row]) -> None:
        kinds = {int: arrow.int64(), float: arrow.float64(), str: arrow.string()}
        kinds[bool] = arrow.bool_()
        schema = arrow.schema([(name, kinds[kind]) for name, kind in columns.items()])
        with files.ParquetWriter(path, schema) as writer:
            every = iter(rows)
            for first in every:
                part = list(islice(chain([first], every), _ROWS))
                table = {
                    name: [None if (v := row.get(name)) is None else kind(v) for row in part]
                    for name, kind in columns.items()
                }
                writer.write_table(arrow.table(table, schema=schema))

    return write
