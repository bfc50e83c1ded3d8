"""Rows by index: against NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from tests.trainer.replica.wgpu.on_device import draw, run
from trainer.replica.wgpu.gpu.device import Device
from trainer.replica.wgpu.kernels import pool
from trainer.replica.wgpu.kernels.pool import SKIPPED


def gather_rows(table: np.ndarray, index: np.ndarray) -> np.ndarray:
    wanted = index != SKIPPED
    return np.where(wanted[:, None], table[np.where(wanted, index, 0)], 0)


def scatter_rows(x: np.ndarray, index: np.ndarray, out: np.ndarray) -> np.ndarray:
    wanted = index != SKIPPED
    out = out.copy()
    out[index[wanted]] = x[wanted]
    return out


INDICES = [[0], [4, 0, 2], [SKIPPED, 3, SKIPPED, 1]]


@pytest.mark.parametrize("width", [1, 64, 70])
@pytest.mark.parametrize("index", [*INDICES, [2, 2, 2]])
def test_gather_is_numpys(device: Device, index: list[int], width: int) -> None:
    table, rows = draw(5, width), np.array(index)
    before = np.full((len(index), width), np.nan)
    (got,) = run(device, pool.gather_rows, [table, rows], [before])
    np.testing.assert_array_equal(got, gather_rows(table, rows))


@pytest.mark.parametrize("width", [1, 64, 70])
@pytest.mark.parametrize("index", INDICES)
def test_scatter_is_numpys(device: Device, index: list[int], width: int) -> None:
    x, rows, before = draw(len(index), width), np.array(index), draw(5, width, number=1)
    (got,) = run(device, pool.scatter_rows, [x, rows], [before])
    np.testing.assert_array_equal(got, scatter_rows(x, rows, before))


def test_more_rows_than_a_grid_has_groups_along_one_axis(device: Device) -> None:
    rows = np.arange(65_537)[::-1].copy()
    table = draw(len(rows), 1)
    (got,) = run(device, pool.gather_rows, [table, rows], [np.zeros(table.shape)])
    np.testing.assert_array_equal(got, table[::-1])
