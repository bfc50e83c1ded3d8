"""What Parquet's codings and zstd make of the columns of a shard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from rig.report import Ratio, Report
from trainer.distill.logits.scores import Window
from trainer.distill.logits.shard import LEVEL


def codings(report: Report, windows: Sequence[Window]) -> None:
    """Report the bytes a position of `topk` without draws, by order of entries and coding."""
    positions = sum(len(window.tokens) - 1 for window in windows)
    ids = np.concatenate([window.scores.ids for window in windows]).reshape(positions, -1)
    logprobs = np.concatenate(
        [window.scores.logprobs for window in windows if window.scores.logprobs is not None]
    ).reshape(ids.shape)
    order = np.argsort(ids, axis=1)
    by_id = np.take_along_axis(ids, order, axis=1)
    half = logprobs.astype(np.float16)
    columns = {
        "ids, the most likely first": ids,
        "ids, sorted": by_id,
        "ids, sorted, differences": np.diff(by_id, axis=1, prepend=0).astype(np.int32),
        "logprobs, half": half,
        "logprobs, half, sorted by id": np.take_along_axis(half, order, axis=1),
        "logprobs, half in float": half.astype(np.float32),
        "logprobs, float": logprobs,
    }
    for name, values in columns.items():
        plain = column_bytes(values, "PLAIN")
        for coding in ("DICTIONARY", "DELTA_BINARY_PACKED", "BYTE_STREAM_SPLIT"):
            if coding != "DELTA_BINARY_PACKED" or values.dtype == np.int32:
                found = column_bytes(values, coding)
                against = f"plain, {plain:.1f}"
                report.add(Ratio(f"{name}, {coding}, {found:.1f}", found / plain, against))


def column_bytes(values: NDArray[Any], coding: str) -> float:
    """Return the bytes a position of one column of lists of lists; values are `[P, K]`."""
    positions, kept = values.shape
    inner = pa.ListArray.from_arrays(
        np.arange(positions + 1, dtype=np.int32) * kept, pa.array(values.reshape(-1))
    )
    column = pa.ListArray.from_arrays(np.array([0, positions], np.int32), inner)
    sink = pa.BufferOutputStream()
    dictionary = coding == "DICTIONARY"
    pq.write_table(
        pa.table({"values": column}),
        sink,
        compression="zstd",
        compression_level=LEVEL,
        use_dictionary=dictionary,
        column_encoding=None if dictionary else coding,
    )
    return sink.getvalue().size / positions
