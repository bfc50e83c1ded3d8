"""Rows of Parquet and Arrow as records, by pyarrow.

Only the columns of a data line's keys are decoded: times, images and embeddings beside them cost
nothing and do no harm.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, BinaryIO

from trainer.data.annotation_status import find_rejections, is_status
from trainer.data.arrow_messages import unpacked_sizes
from trainer.data.labels import LABEL, ClassNumber
from trainer.data.parquet_pages import DELTA_TEXT, DICTIONARY, read_pages
from trainer.data.records import MAX_RECORD_BYTES, PIECE, Record, choose_columns
from trainer.data.shapes import LABELLED_KEYS, LINE_KEYS, PAIR_KEYS
from trainer.system.errors import InputError

ROWS = 64
"""Rows that are decoded at once; a dictionary may make each as long as a record can be."""
_PAGE, _ELEMENTS = 256 << 20, 1 << 24
"""Bytes and elements of a page of Parquet; writers make pages of 1 MiB, or of 1,000 rows."""
_COPIED = 64 << 20
"""Bytes of texts that a batch may copy from a dictionary."""
_BATCH = 1 << 30
"""Bytes that a batch of a packed Arrow file unpacks to; writers make batches of 64,000 rows."""
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
        chosen = _choose_columns(pa, file.schema_arrow, columns, place)
        names = list(dict.fromkeys(chosen.values()))
        _check_sizes(file.metadata, set(names), place)
        batches = _iter_row_groups(parquet, file, stream, names, place)
        yield from _iter_rows(pa, batches, file.schema_arrow, chosen, columns, place)


def _iter_row_groups(
    parquet: Any, file: Any, stream: BinaryIO, names: list[str], place: str
) -> Iterator[Any]:
    """Yield the rows of each row group, after its pages are found to be of a size to decode.

    A text that a dictionary holds stays there where the texts of a batch would be large.
    """
    whole: dict[tuple[str, ...], Any] = {(): file}
    for group in range(file.metadata.num_row_groups):
        try:
            kept = _choose_dictionary_columns(stream, file.metadata.row_group(group), names, place)
        except ValueError as error:
            raise InputError(f"{place}: is truncated or damaged: {error}; copy it again") from None
        if kept not in whole:
            whole[kept] = parquet.ParquetFile(
                stream, read_dictionary=list(kept), buffer_size=PIECE, pre_buffer=False
            )
        yield from whole[kept].iter_batches(ROWS, row_groups=[group], columns=names)


def _is_chosen(path: str, names: Iterable[str]) -> bool:
    """Return whether a column of Parquet is one of those with these names, or within one."""
    return any(path == name or path.startswith(f"{name}.") for name in names)


def _choose_dictionary_columns(
    stream: BinaryIO, group: Any, names: list[str], place: str
) -> tuple[str, ...]:
    """Return the columns of a row group whose texts are to stay in their dictionary.

    Raises:
        InputError: a page unpacks to more than can be decoded.
        ValueError: a page's header is damaged.
    """
    kept: list[str] = []
    for number in range(group.num_columns):
        column = group.column(number)
        path = column.path_in_schema
        if not _is_chosen(path, names):
            continue
        pages = list(read_pages(stream, column))
        is_nested = path not in names
        elements = max((page.values for page in pages), default=0)
        rows = elements if is_nested else min(elements, ROWS)
        sizes = [page.size for page in pages]
        shared = [page.size for page in pages if page.encoding == DELTA_TEXT]
        copied = max((page.size for page in pages if page.kind == DICTIONARY), default=0) * rows
        if (
            max(sizes, default=0) > _PAGE
            or (is_nested and elements > _ELEMENTS)
            or max(shared, default=0) * rows > 4 * _PAGE
        ):
            raise InputError(
                f"{place}: a page of column {path!r} unpacks to more than {_PAGE >> 20} MiB or"
                f" {_ELEMENTS:,} elements; write the file again with smaller pages"
            )
        if copied > _COPIED and column.physical_type == "BYTE_ARRAY":
            kept.append(path)
    return tuple(kept)


def arrow_rows(
    pa: Any, stream: BinaryIO, place: str, columns: Mapping[str, str]
) -> Iterator[Record]:
    """Yield the rows of an Arrow file or stream; see `parquet_rows`."""
    with _damage_named(pa, place):
        if stream.read(6) == b"ARROW1":
            _check_messages(stream, True, place)
            reader = pa.ipc.open_file(stream)
            found = (reader.get_batch(index) for index in range(reader.num_record_batches))
        else:
            stream.seek(-len(_END), 2)
            if stream.read() != _END:
                raise InputError(f"{place}: is truncated or damaged: no end mark; copy it again")
            _check_messages(stream, False, place)
            found = reader = pa.ipc.open_stream(stream)
        chosen = _choose_columns(pa, reader.schema, columns, place)
        yield from _iter_rows(pa, _split_batches(found), reader.schema, chosen, columns, place)


def _split_batches(batches: Iterator[Any]) -> Iterator[Any]:
    """Yield parts of batches; pyarrow itself does not check where their texts and lists end."""
    for batch in batches:
        batch.validate(full=True)
        for start in range(0, len(batch), ROWS):
            yield batch.slice(start, ROWS)


def _check_messages(stream: BinaryIO, is_file: bool, place: str) -> None:
    """Check what the batches of a stream unpack to, and go back to its begin.

    Raises:
        InputError: it is too much, or a message is damaged.
    """
    try:
        most = max(unpacked_sizes(stream, is_file), default=0)
    except ValueError as error:
        raise InputError(f"{place}: is truncated or damaged: {error}; copy it again") from None
    if most > _BATCH:
        raise InputError(
            f"{place}: a batch unpacks to more than {_BATCH >> 20} MiB; write the file again with"
            " smaller batches"
        )
    stream.seek(0)


@contextmanager
def _damage_named(pa: Any, place: str) -> Iterator[None]:
    try:
        yield
    except pa.ArrowException as error:
        raise InputError(
            f"{place}: is truncated or damaged: {_error_line(error)}; copy it again"
        ) from None


def _error_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0].rstrip(".")


def _choose_columns(pa: Any, schema: Any, columns: Mapping[str, str], place: str) -> dict[str, str]:
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
    chosen |= {
        name: name
        for name in schema.names
        if is_status(name)
        and name not in chosen.values()
        and _is_plain(pa, schema.field(name).type)
    }
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


def _check_sizes(metadata: Any, names: set[str], place: str) -> None:
    """Check before anything is unpacked that rows are no longer than a record may be."""
    for index in range(metadata.num_row_groups):
        group = metadata.row_group(index)
        for number in range(group.num_columns):
            column = group.column(number)
            if not _is_chosen(column.path_in_schema, names) or not group.num_rows:
                continue
            mean = column.total_uncompressed_size / group.num_rows
            if mean > MAX_RECORD_BYTES:
                raise InputError(
                    f"{place}: column {column.path_in_schema!r} has {mean / 2**20:,.0f} MiB a row;"
                    f" a record may have {MAX_RECORD_BYTES >> 20} MiB"
                )


def _iter_rows(
    pa: Any,
    batches: Iterator[Any],
    schema: Any,
    chosen: Mapping[str, str],
    columns: Mapping[str, str],
    place: str,
) -> Iterator[Record]:
    """Yield the rows of batches; a column that is not decoded has the value `...`."""
    others = {} if columns else {name: ... for name in schema.names if name not in chosen}
    kinds = {ours: schema.field(theirs).type for ours, theirs in chosen.items()}
    readers = {
        ours: _make_reader(pa, kind) for ours, kind in kinds.items() if pa.types.is_nested(kind)
    }
    names = _class_names(schema, chosen.get(LABEL))
    source, number = f"{place}: row ", 0
    for batch in batches:
        for row in _iter_values(pa, batch, list(chosen.values()), f"{source}{number + 1}"):
            number += 1
            tree = dict(zip(chosen, row, strict=True))
            for ours, read in readers.items():
                tree[ours] = read(tree[ours])
            if columns:  # the others are not read, but for what rejects a row
                given = {ours: tree.pop(ours) for ours in chosen if ours not in columns}
                tree |= find_rejections(given)
            if names and isinstance(tree[LABEL], int):
                tree[LABEL] = ClassNumber(tree[LABEL])
                tree[LABEL].names = names
            yield Record(tree | others, source, number)


def _iter_values(pa: Any, batch: Any, names: list[str], place: str) -> Iterator[tuple[Any, ...]]:
    """Yield the values of each row of a batch, of which none is larger than a record may be.

    Raises:
        InputError: a row of it is; `place` is its first one.
    """
    for name in names:
        try:
            size = json_size(pa, batch.column(name))
        except ValueError as error:
            raise InputError(f"{place}: column {name!r}: {error}; write it as lists") from None
        if size > MAX_RECORD_BYTES and len(batch) == 1:
            limit = MAX_RECORD_BYTES >> 20
            raise InputError(
                f"{place}: column {name!r} has {size >> 20:,} MiB; a record may have {limit} MiB"
            )
        if size > MAX_RECORD_BYTES:
            source, _, first = place.rpartition(" ")
            for index in range(len(batch)):
                row = batch.slice(index, 1)
                yield from _iter_values(pa, row, names, f"{source} {int(first) + index}")
            return
    columns = [batch.column(name).to_pylist() for name in names]
    yield from zip(*columns, strict=True)


def _class_names(schema: Any, column: str | None) -> tuple[str, ...]:
    """Return the names of a column's classes, which `datasets` writes beside a table's columns."""
    try:
        info = json.loads((schema.metadata or {})[b"huggingface"])["info"]
        feature = info["features"][column]
        names = feature["names"] if feature["_type"] == "ClassLabel" else ()
    except (KeyError, TypeError, ValueError):  # none, or of another writer
        return ()
    return tuple(map(str, names))


def _is_plain(pa: Any, kind: Any) -> bool:
    """Return whether JSON has all values of a type.

    Args:
        pa: the module pyarrow.
    """
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


def _make_reader(pa: Any, kind: Any) -> Callable[[Any], Any]:
    """Return what makes the values of a type those of JSON; what JSON lacks becomes a text.

    A column of objects has one type, so each object has the keys of all others, with null: a null
    of an object is a missing key. A null that the author wrote there cannot be told from those, and
    needs JSON Lines or JSON in a text. The nulls of lists and of maps are the author's.
    """
    types = pa.types
    if types.is_struct(kind):
        fields = [kind.field(index) for index in range(kind.num_fields)]
        readers = {field.name: _make_reader(pa, field.type) for field in fields}
        return _for_present(
            lambda value: {
                name: read(value[name]) for name, read in readers.items() if value[name] is not None
            }
        )
    if types.is_map(kind):
        read_item = _make_reader(pa, kind.item_type)
        return _for_present(lambda value: {str(key): read_item(item) for key, item in value})
    if types.is_nested(kind):
        read_element = _make_reader(pa, kind.value_type)
        return _for_present(lambda value: [read_element(element) for element in value])
    return _read_as_is if _is_plain(pa, kind) else _for_present(_read_as_text)


def _for_present(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else read(value)


def _read_as_is(value: Any) -> Any:
    return value


def _read_as_text(value: Any) -> str:
    return f"{len(value)} bytes" if isinstance(value, bytes) else str(value)


def json_size(pa: Any, array: Any) -> int:
    """Return the bytes that an array's values have at least as JSON, before objects are made.

    Arrow needs hardly any memory for empty elements, and for a text that many rows refer to; Python
    needs it for each. So a row has the limit of a line of JSON.

    Args:
        pa: the module pyarrow.

    Raises:
        ValueError: it is of a type whose elements share memory in other ways; names the type.
    """
    types, kind = pa.types, array.type
    if types.is_dictionary(kind):
        sizes = _text_sizes(pa, array.dictionary)
        if sizes is None:
            return _plain_size(pa, array.dictionary.type, len(array))
        known = array.indices.drop_null().to_numpy(zero_copy_only=False)
        return len(array) + int(sizes[known].sum())
    if types.is_struct(kind):
        names = sum(len(kind.field(index).name) + 4 for index in range(kind.num_fields))
        fields = (array.field(index) for index in range(kind.num_fields))  # of the slice alone
        return len(array) * (names + 2) + sum(json_size(pa, field) for field in fields)
    if types.is_map(kind):
        first, last = (array.offsets[index].as_py() for index in (0, len(array)))
        inner = (array.keys, array.items)
        return len(array) + sum(json_size(pa, each.slice(first, last - first)) for each in inner)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        flat = array.flatten()
        return len(array) + len(flat) + json_size(pa, flat)
    if (sizes := _text_sizes(pa, array)) is not None:
        return len(array) + int(sizes.sum())
    return _plain_size(pa, kind, len(array))


def _plain_size(pa: Any, kind: Any, count: int) -> int:
    if pa.types.is_nested(kind) or not (pa.types.is_null(kind) or _get_bit_width(kind)):
        raise ValueError(f"{kind} is not read")
    return count * (4 if pa.types.is_null(kind) else 1)


def _get_bit_width(kind: Any) -> int:
    try:
        return int(kind.bit_width)
    except ValueError:  # of no fixed size
        return 0


def _text_sizes(pa: Any, array: Any) -> Any:
    """Return the bytes of each text or binary value; None of an array of other values."""
    # Not above: a worker decides on NumPy's threads before it is imported.
    import numpy as np
    from pyarrow import compute

    functions: Any = compute  # made at its import, so that its types lack them
    types, kind = pa.types, array.type
    if types.is_string_view(kind) or types.is_binary_view(kind):  # a view begins with its size
        views = np.frombuffer(array.buffers()[1] or b"", np.int32)[::4]
        return views[array.offset : array.offset + len(array)].astype(np.int64)
    tests = (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary)
    if any(test(kind) for test in tests):
        return functions.binary_length(array).fill_null(0).to_numpy(zero_copy_only=False)
    return None
