"""Rows of Parquet and Arrow as records, by pyarrow.

Only the columns of a data line's keys are decoded: times, images and embeddings beside them cost
nothing and do no harm.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, BinaryIO

from trainer.data.labels import LABEL, ClassNumber
from trainer.data.records import MAX_RECORD_BYTES, PIECE, Record, choose_columns
from trainer.data.shapes import LABELLED_KEYS, LINE_KEYS, PAIR_KEYS
from trainer.system.errors import InputError

ROWS = 64
"""Rows that are decoded at once; a dictionary may make each as long as a record can be."""
_END = b"\0\0\0\0"
"""Ends an Arrow stream."""


def parquet_rows(
    pa: Any, stream: BinaryIO, place: str, columns: Mapping[str, str]
) -> Iterator[Record]:
    """Yield the rows of a Parquet file.

    Args:
        pa: the module pyarrow.

    Raises:
        InputError: it is damaged, lacks a column, or a column is not text, numbers, or lists and
            objects of them.
    """
    from pyarrow import parquet

    with _damage_named(pa, place):
        # A row group may be as large as the file, so its pages are read as they are needed.
        file = parquet.ParquetFile(stream, buffer_size=PIECE, pre_buffer=False)
        chosen = _choose(pa, file.schema_arrow, columns, place)
        _check_sizes(file.metadata, set(chosen.values()), place)
        batches = file.iter_batches(ROWS, columns=list(dict.fromkeys(chosen.values())))
        yield from _rows(pa, batches, file.schema_arrow, chosen, columns, place)


def arrow_rows(
    pa: Any, stream: BinaryIO, place: str, columns: Mapping[str, str]
) -> Iterator[Record]:
    """Yield the rows of an Arrow file or stream; see `parquet_rows`."""
    with _damage_named(pa, place):
        if stream.read(6) == b"ARROW1":
            stream.seek(0)
            reader = pa.ipc.open_file(stream)
            found = (reader.get_batch(index) for index in range(reader.num_record_batches))
        else:
            stream.seek(-len(_END), 2)
            if stream.read() != _END:
                raise InputError(f"{place}: is cut or damaged: it has no end mark; copy it again")
            stream.seek(0)
            found = reader = pa.ipc.open_stream(stream)
        chosen = _choose(pa, reader.schema, columns, place)
        parts = (
            batch.slice(start, ROWS) for batch in found for start in range(0, len(batch), ROWS)
        )
        yield from _rows(pa, parts, reader.schema, chosen, columns, place)


@contextmanager
def _damage_named(pa: Any, place: str) -> Iterator[None]:
    try:
        yield
    except pa.ArrowException as error:
        raise InputError(f"{place}: is cut or damaged: {_line(error)}; copy it again") from None


def _line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0].rstrip(".")


def _choose(pa: Any, schema: Any, columns: Mapping[str, str], place: str) -> dict[str, str]:
    """Return the columns to decode, our name to the file's."""
    used = LINE_KEYS.used | LABELLED_KEYS.used | PAIR_KEYS.used
    wanted = used | LABELLED_KEYS.refused.keys()
    every = choose_columns(schema.names, columns, f"{place}:")
    chosen = {ours: theirs for ours, theirs in every.items() if columns or ours in wanted}
    if not chosen:
        there = ", ".join(repr(name) for name in schema.names[:20]) or "none"
        raise InputError(
            f"{place}: none of its columns is a key of a data line: it has {there}; name them with"
            " data.columns"
        )
    for ours, theirs in list(chosen.items()):
        kind = schema.field(theirs).type
        if not _is_plain(pa, kind) and not pa.types.is_nested(kind):
            if ours not in used and not columns:  # refused, whatever its type
                del chosen[ours]
                continue
            name = repr(theirs) if ours == theirs else f"{theirs!r} (data.columns.{ours})"
            raise InputError(
                f"{place}: column {name} is {kind}, expected text, numbers or lists of objects;"
                " name another one with data.columns"
            )
    return chosen


def _is_plain(pa: Any, kind: Any) -> bool:
    """Whether JSON has all values of a type."""
    types = pa.types
    if types.is_dictionary(kind):
        return _is_plain(pa, kind.value_type)
    if types.is_nested(kind):
        return all(_is_plain(pa, kind.field(index).type) for index in range(kind.num_fields))
    tests = (
        *(types.is_null, types.is_boolean, types.is_integer, types.is_floating),
        *(types.is_string, types.is_large_string, types.is_string_view),
    )
    return any(test(kind) for test in tests)


def _check_sizes(metadata: Any, names: set[str], place: str) -> None:
    """Check before anything is unpacked that rows are no longer than a record may be."""
    for index in range(metadata.num_row_groups):
        group = metadata.row_group(index)
        for number in range(group.num_columns):
            column = group.column(number)
            if column.path_in_schema.split(".")[0] not in names or not group.num_rows:
                continue
            mean = column.total_uncompressed_size / group.num_rows
            if mean > MAX_RECORD_BYTES:
                raise InputError(
                    f"{place}: column {column.path_in_schema!r} has {mean / 2**20:,.0f} MiB a row;"
                    f" a record may have {MAX_RECORD_BYTES >> 20} MiB"
                )


def _rows(
    pa: Any,
    batches: Iterator[Any],
    schema: Any,
    chosen: Mapping[str, str],
    columns: Mapping[str, str],
    place: str,
) -> Iterator[Record]:
    """Yield the rows of batches; a column that is not decoded has the value `...`."""
    others = {} if columns else {name: ... for name in schema.names if name not in chosen}
    odd = [ours for ours, theirs in chosen.items() if not _is_plain(pa, schema.field(theirs).type)]
    names = _class_names(schema, chosen.get(LABEL))
    source, number = f"{place}: row ", 0
    for batch in batches:
        values = [batch.column(theirs).to_pylist() for theirs in chosen.values()]
        for row in zip(*values, strict=True):
            number += 1
            tree = dict(zip(chosen, row, strict=True))
            for ours in odd:
                tree[ours] = _as_json(tree[ours])
            if names and isinstance(tree[LABEL], int):
                tree[LABEL] = ClassNumber(tree[LABEL])
                tree[LABEL].names = names
            yield Record(tree | others, source, number)


def _class_names(schema: Any, column: str | None) -> tuple[str, ...]:
    """Return the names of a column's classes, which `datasets` writes beside a table's columns."""
    try:
        info = json.loads((schema.metadata or {})[b"huggingface"])["info"]
        feature = info["features"][column]
        names = feature["names"] if feature["_type"] == "ClassLabel" else ()
    except (KeyError, TypeError, ValueError):  # none, or of another writer
        return ()
    return tuple(map(str, names))


def _as_json(value: Any) -> Any:
    """Return a value with texts for what JSON lacks, such as the time of a turn."""
    if isinstance(value, dict):
        return {str(key): _as_json(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(each) for each in value]
    if value is None or isinstance(value, str | bool | int | float):
        return value
    return f"{len(value)} bytes" if isinstance(value, bytes) else str(value)
