"""Column sums: against NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from tests.trainer.replica.wgpu.on_device import agree, draw, run
from trainer.replica.wgpu.gpu.device import Device
from trainer.replica.wgpu.kernels import columns


def sum_columns(x: np.ndarray, parts: int) -> np.ndarray:
    rows = -(-len(x) // parts)
    starts = np.arange(parts) * rows
    return np.stack([x[start : start + rows].sum(0, dtype=np.float64) for start in starts])


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(("shape", "parts"), [((1, 1), 1), ((5, 130), 3), ((3, 64), 7)])
def test_sums_are_numpys(
    device: Device, shape: tuple[int, int], parts: int, accumulate: bool
) -> None:
    x, before = draw(*shape), draw(parts, shape[1], number=1)
    (sums,) = run(device, columns.sum_columns, [x], [before], accumulate=accumulate)
    agree(sums, before * accumulate + sum_columns(x, parts))
