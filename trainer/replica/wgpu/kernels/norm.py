"""RMSNorm (Zhang and Sennrich, arXiv 1910.07467), forward and backward."""

from __future__ import annotations

import struct

from trainer.replica.wgpu.array import Array
from trainer.replica.wgpu.graph import Graph, spread
from trainer.replica.wgpu.kernels.source import source


def rms_norm(graph: Graph, x: Array, weight: Array, y: Array, *, eps: float) -> None:
    """Record y `[R, D]` = RMSNorm of x `[R, D]` with weight `[D]`."""
    rows, width = x.shape
    assert weight.shape == (width,), weight.shape
    assert y.shape == x.shape, y.shape
    params = struct.pack("<IIf", rows, width, eps)
    graph.add("rms_norm", source("rms_norm"), [x, weight, y], params, spread(rows))
