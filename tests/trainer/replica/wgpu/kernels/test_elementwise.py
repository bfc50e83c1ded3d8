"""Single elements: against NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from tests.trainer.replica.wgpu.on_device import draw, run
from trainer.replica.wgpu.gpu.device import Device
from trainer.replica.wgpu.kernels import elementwise

SHAPES = [(1,), (3, 85), (2, 128, 3)]


@pytest.mark.parametrize("shape", SHAPES)
def test_each_is_numpys(device: Device, shape: tuple[int, ...]) -> None:
    x, y = draw(*shape), draw(*shape, number=1)
    for got, expected in [
        (run(device, elementwise.copy, [x], [y]), x),
        (run(device, elementwise.fill, [], [y], value=0.5), np.full(shape, np.float32(0.5))),
    ]:
        np.testing.assert_array_equal(got[0], expected)


def test_arrays_beyond_a_kernel_argument_are_done_in_windows(narrow: Device) -> None:
    x, y = draw(40_001), draw(40_001, number=1)
    (got,) = run(narrow, elementwise.copy, [x], [y])
    np.testing.assert_array_equal(got, x)
