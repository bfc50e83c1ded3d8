"""One shard as a Parquet file: a row is a window, its scores are lists.

The format is documented in docs/logits-format.md; pyarrow is imported here alone.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from io import BytesIO
from typing import Any, overload

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from trainer import __version__
from trainer.data.parquet_pages import check_plain_pages
from trainer.distill.logits.description import MOST_ENTRIES, SCHEMA, Description, ShardPlan
from trainer.distill.logits.scores import Scores, Window
from trainer.system.errors import InputError

_POSITION_FIELDS = ("tail", "dropped", "entropy")
_ENTRY_KINDS = {"ids": pa.int32(), "logprobs": pa.float32(), "counts": pa.int16()}
_HALF = ("logprobs", *_POSITION_FIELDS)
_ENTRY_BYTES = 16
"""Most bytes of one entry in memory, with its place; a position and a window have some more."""
_SLACK = 1 << 20
_ROUNDED = 0.01
"""Most that rounding to float16 and float32 adds to a probability, its logarithm or an entropy."""
LEVEL = 3
"""Level of zstd, its default: smaller than 1, and 9 is much slower for little gain."""
_RATIO, _SMALLEST = 1000, 16 << 20
"""Times that a shard's bytes unpack to at most; scores of a teacher take 2 to 10 times theirs."""


def encode_windows(
    description: Description, plan: ShardPlan, windows: Sequence[Window]
) -> memoryview:
    """Return the Parquet file of a shard.

    Raises:
        InputError: it has more than the lists of one column can hold.
    """
    schema = shard_schema(description, plan)
    if sum(int(window.scores.offsets[-1]) for window in windows) > MOST_ENTRIES:
        raise InputError(f"{plan.name}: more than {MOST_ENTRIES} scores; make shards smaller")
    columns: dict[str, pa.Array] = {
        "document": pa.array([window.document for window in windows], pa.int64()),
        "start": pa.array([window.start for window in windows], pa.int32()),
        "tokens": _per_token([window.tokens for window in windows], pa.int32()),
    }
    half = description.values == "float16"
    for name in schema.names[len(columns) :]:
        parts = [getattr(window.scores, name) for window in windows]
        if half and name in _HALF:
            # float32 with trailing zeros: compressed as small as float16, read everywhere.
            parts = [part.astype(np.float16).astype(np.float32) for part in parts]
        if name in _ENTRY_KINDS:
            offsets = [window.scores.offsets for window in windows]
            columns[name] = _per_entry(parts, offsets, _ENTRY_KINDS[name])
        else:
            columns[name] = _per_token(parts, pa.float32())
    sink = pa.BufferOutputStream()
    # Measured against plain, dictionary and delta coding: docs/logits-format.md.
    pq.write_table(
        pa.table(columns, schema=schema),
        sink,
        compression="zstd",
        compression_level=LEVEL,
        use_dictionary=False,
        column_encoding="BYTE_STREAM_SPLIT",
    )
    return memoryview(sink.getvalue())


def decode_windows(description: Description, plan: ShardPlan, content: bytes) -> Sequence[Window]:
    """Return the windows of a shard's Parquet file.

    Raises:
        ValueError: it is not Parquet, not this shard of this folder, or holds values that no
            teacher gives; names the window of the first one.
    """
    try:
        file = pq.ParquetFile(pa.BufferReader(content))
        _check_metadata(file, description, plan)
        check_plain_pages(BytesIO(content), file.metadata, most_unpacked(content))
        # In this thread alone, not through pq.read_table: its threads keep a reference to our bytes
        # for a moment after it has returned. If one releases it while the interpreter exits, the
        # thread is ended inside a C++ destructor, and the process aborts (exit code -6).
        table = file.read(use_threads=False)
    except pa.ArrowException as error:
        raise ValueError(f"not usable Parquet: {error}") from None
    windows = ShardWindows(description.tokenizer.size, table.combine_chunks())
    windows.check_values(description)
    return windows


def most_unpacked(content: bytes) -> int:
    """Return the bytes that a shard's file may unpack to, whatever its folder says of it."""
    return max(_SMALLEST, _RATIO * len(content))


def _check_metadata(file: pq.ParquetFile, description: Description, plan: ShardPlan) -> None:
    """Check what a file says of itself, before anything is unpacked.

    Raises:
        ValueError: it is not this shard, or would become larger than its scores can be.
    """
    wanted = shard_schema(description, plan)
    if not file.schema_arrow.equals(wanted):
        raise ValueError("its columns are not those of this folder")
    own = file.schema_arrow.metadata or {}
    for key in (b"motley.dataset", b"motley.shard"):
        if own.get(key) != wanted.metadata[key]:
            raise ValueError(f"{key.decode()} is {own.get(key)!r}, not {wanted.metadata[key]!r}")
    metadata = file.metadata
    if metadata.num_rows != plan.windows:
        raise ValueError(f"{metadata.num_rows} windows, expected {plan.windows}")
    size = sum(
        metadata.row_group(number).total_byte_size for number in range(metadata.num_row_groups)
    )
    if size > (most := _most_bytes(description, plan)):
        raise ValueError(f"unpacks to {size:,} bytes; its scores have at most {most:,}")


class ShardWindows(Sequence[Window]):
    """The windows of a shard, copied out of the columns on demand."""

    def __init__(self, vocabulary: int, table: pa.Table) -> None:
        self._vocabulary = vocabulary
        self._documents = table["document"].to_numpy()
        self._starts = table["start"].to_numpy()
        self._bounds = _read_column(table, "tokens").offsets.to_numpy()
        self._tokens = _read_column(table, "tokens").values.to_numpy()
        self._positions = {
            name: _read_column(table, name).values.to_numpy() for name in _POSITION_FIELDS
        }
        nested = {
            name: _read_column(table, name).values
            for name in _ENTRY_KINDS
            if name in table.column_names
        }
        self._offsets = next(iter(nested.values())).offsets.to_numpy()
        self._entries = {name: column.values.to_numpy() for name, column in nested.items()}

    def check_values(self, description: Description) -> None:
        """Check every value against what a teacher can give.

        Raises:
            ValueError: names the window of the first wrong value.
        """
        last = self._vocabulary - 1
        full = description.scheme.kind == "full"
        ranges = {"ids": (0, last), "logprobs": (-np.inf, _ROUNDED), "counts": (0, 2**15)}
        # NaN is in no range.
        self._check_column("tokens", self._tokens, (0, last), self._bounds)
        for name, values in self._positions.items():
            most = np.log(self._vocabulary) if name == "entropy" else 1.0
            self._check_column(name, values, (-_ROUNDED, most + _ROUNDED), self._bounds)
        windows = self._offsets[self._bounds]
        for name, values in self._entries.items():
            self._check_column(name, values, ranges[name], windows)
        counts = np.diff(self._offsets)
        first = np.zeros(len(counts), np.bool_)
        first[self._bounds[:-1]] = True
        if np.any(counts[first]) or (full and not np.isin(counts, (0, self._vocabulary)).all()):
            raise ValueError("the number of a position's scores is not that of its scheme")

    def _check_column(
        self,
        name: str,
        values: NDArray[Any],
        allowed: tuple[float, float],
        bounds: NDArray[np.integer],
    ) -> None:
        low, high = allowed
        with np.errstate(invalid="ignore"):
            wrong = ~((values >= low) & (values <= high))
        if wrong.any():
            at = int(np.argmax(wrong))
            window = int(np.searchsorted(bounds, at, "right")) - 1
            raise ValueError(
                f"window {window}: {name} has {values[at]}, outside {low:g} to {high:g}"
            )

    def __len__(self) -> int:
        return len(self._documents)

    @overload
    def __getitem__(self, index: int) -> Window: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Window]: ...
    def __getitem__(self, index: int | slice) -> Window | Sequence[Window]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        if index < 0:
            index += len(self)
        if not 0 <= index < len(self):
            raise IndexError(index)
        first, last = int(self._bounds[index]), int(self._bounds[index + 1])
        return Window(
            document=int(self._documents[index]),
            start=int(self._starts[index]),
            tokens=self._tokens[first:last].copy(),
            scores=self._slice_scores(first, last),
        )

    def _slice_scores(self, first: int, last: int) -> Scores:
        offsets = self._offsets[first : last + 1].astype(np.int64)
        begin, end = int(offsets[0]), int(offsets[-1])
        offsets -= begin
        entries = {name: values[begin:end].copy() for name, values in self._entries.items()}
        if "ids" not in entries:  # full: every token, by id
            rows = (end - begin) // self._vocabulary
            entries["ids"] = np.tile(np.arange(self._vocabulary, dtype=np.int32), rows)
        counts = entries.get("counts")
        return Scores(
            offsets=offsets,
            ids=entries["ids"],
            logprobs=entries.get("logprobs"),
            counts=np.zeros(end - begin, np.int32) if counts is None else counts.astype(np.int32),
            **{name: values[first:last].copy() for name, values in self._positions.items()},
        )


def shard_schema(description: Description, plan: ShardPlan) -> pa.Schema:
    """Return the columns of a shard and their metadata."""
    scheme = description.scheme
    fields = [("document", pa.int64()), ("start", pa.int32()), ("tokens", pa.list_(pa.int32()))]
    entries = {
        "topk": ["ids", "logprobs", "counts"] if scheme.tail_samples else ["ids", "logprobs"],
        "sampled": ["ids", "counts"],
        "full": ["logprobs"],
    }[scheme.kind]
    fields += [(name, pa.list_(pa.list_(_ENTRY_KINDS[name]))) for name in entries]
    fields += [(name, pa.list_(pa.float32())) for name in _POSITION_FIELDS]
    metadata = {
        "motley.schema": SCHEMA,
        "motley.dataset": description.digest,
        "motley.teacher": json.dumps(asdict(description.teacher)),
        "motley.tokenizer": json.dumps(asdict(description.tokenizer)),
        "motley.corpus": json.dumps(asdict(description.corpus)),
        "motley.scheme": json.dumps(asdict(scheme)),
        "motley.values": description.values,
        "motley.shard": json.dumps(asdict(plan)),
        "motley.versions": json.dumps({"motley": __version__, "pyarrow": version("pyarrow")}),
    }
    return pa.schema(fields, metadata=metadata)


def _most_bytes(description: Description, plan: ShardPlan) -> int:
    """Return the bytes that a shard's columns have at most when unpacked."""
    scheme = description.scheme
    entries = {
        "topk": scheme.top_k + scheme.tail_samples,
        "sampled": scheme.samples,
        "full": description.tokenizer.size,
    }[scheme.kind]
    return plan.tokens * (entries + 4) * _ENTRY_BYTES + plan.windows * 64 + _SLACK


def _read_column(table: pa.Table, name: str) -> Any:
    column = table[name]
    found = column.chunk(0) if column.num_chunks else pa.array([], column.type)
    inner = found.values if isinstance(found, pa.ListArray) else found
    if found.null_count or inner.null_count:
        raise ValueError(f"{name} has empty values")
    return found


def _per_token(arrays: Sequence[NDArray[Any]], kind: pa.DataType) -> pa.Array:
    """Return one list a window."""
    lengths = [len(array) for array in arrays]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return pa.ListArray.from_arrays(offsets, _flatten_arrays(arrays, kind))


def _per_entry(
    arrays: Sequence[NDArray[Any]], offsets: Sequence[NDArray[np.int64]], kind: pa.DataType
) -> pa.Array:
    """Return one list of lists a window."""
    lengths = _flatten_arrays([np.diff(each) for each in offsets], pa.int64()).to_numpy()
    bounds = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    inner = pa.ListArray.from_arrays(bounds, _flatten_arrays(arrays, kind))
    windows = np.concatenate([[0], np.cumsum([len(each) - 1 for each in offsets])])
    return pa.ListArray.from_arrays(windows.astype(np.int32), inner)


def _flatten_arrays(arrays: Sequence[NDArray[Any]], kind: pa.DataType) -> pa.Array:
    dtype = kind.to_pandas_dtype()
    return pa.array(np.concatenate([np.empty(0, dtype), *arrays]).astype(dtype), kind)
