"""Whether numbers are numbers: against NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from tests.trainer.replica.wgpu.on_device import draw, run
from trainer.replica.wgpu.gpu.device import Device
from trainer.replica.wgpu.kernels import finite

SIZE = 1_000


def mark_non_finite(x: np.ndarray, flag: int) -> int:
    return max(flag, int(not np.isfinite(x).all()))


def marked(device: Device, x: np.ndarray, before: int = 0) -> int:
    (flag,) = run(device, finite.mark_non_finite, [x], [np.array([before], np.uint32)])
    assert flag[0] == mark_non_finite(x, before)
    return int(flag[0])


@pytest.mark.parametrize("place", [0, 255, 256, SIZE - 1])
@pytest.mark.parametrize("bits", [0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00000, 0x7F800001])
def test_infinities_and_nans_are_seen_anywhere(device: Device, bits: int, place: int) -> None:
    x = draw(SIZE)
    x.view(np.uint32)[place] = bits
    assert marked(device, x) == 1


def test_huge_and_tiny_numbers_are_numbers(device: Device) -> None:
    limits = np.finfo(np.float32)
    edges = [limits.max, limits.min, limits.tiny, limits.smallest_subnormal, -0.0, 0.0]
    x = np.array(edges + [-value for value in edges], np.float32)
    assert marked(device, x) == 0


def test_a_flag_stays(device: Device) -> None:
    assert marked(device, draw(1), before=1) == 1


def test_arrays_beyond_a_kernel_argument_are_read_in_windows(device: Device) -> None:
    narrow = Device(device.adapter, binding_limit=64 << 10)
    x = draw(40_001)
    assert marked(narrow, x) == 0
    x[-1] = np.inf
    assert marked(narrow, x) == 1
