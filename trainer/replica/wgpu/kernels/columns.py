"""Sums over the rows of a matrix, in an order that never changes.

A long matrix is summed in two stages, so that the device has more to do at once than one walk down
its rows: into some partial sums, which a scratch array holds, then those into one.
"""

from __future__ import annotations

import struct

from trainer.replica.wgpu.array import Array
from trainer.replica.wgpu.graph import Graph, spread
from trainer.replica.wgpu.kernels.source import source

PARTS = 128
"""Partial sums that keep a large GPU busy; any number gives a right sum."""


def sum_columns(graph: Graph, x: Array, sums: Array, *, accumulate: bool = False) -> None:
    """Record sums `[P, D]` = (or +=) the column sums of x `[R, D]`, R / P rows to each."""
    rows, width = x.shape
    parts = sums.shape[0]
    assert sums.shape == (parts, width), (sums.shape, x.shape)
    params = struct.pack("<III", rows, width, parts)
    graph.add(
        "sum_columns",
        source("sum_columns"),
        [x, sums],
        params,
        spread(parts * -(-width // 64)),
        {"ACCUMULATE": accumulate},
    )
