"""PowerSGD: low rank is kept, vectors travel whole, and bytes that lie are refused."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ml_dtypes import bfloat16

from trainer.exchange.protocol.compression.powersgd import PowerSGD
from trainer.system.errors import ProtocolError


def through(codec: PowerSGD, values: np.ndarray) -> np.ndarray:
    encoded = codec.encode(0, values)
    assert encoded.nbytes == codec.nbytes(values.size)
    out = np.full(values.size, 777, np.float32)
    codec.decode(encoded, out)
    return out


def draw(*shape: int) -> np.ndarray:
    return np.random.default_rng(7).standard_normal(shape, dtype=np.float32)


@given(st.integers(1, 500), st.integers(1, 500), st.integers(1, 16))
def test_bytes_follow_the_formula(rows: int, columns: int, rank: int) -> None:
    codec = PowerSGD(rank, [(rows, columns), (rows,)])
    expected = 2 * min(rank * (rows + columns), rows * columns) + 2 * rows
    assert codec.nbytes(rows * columns + rows) == expected


@settings(max_examples=20)
@given(st.integers(20, 60), st.integers(20, 60), st.integers(1, 4))
def test_a_matrix_of_that_rank_is_kept_to_bf16s_precision(
    rows: int, columns: int, rank: int
) -> None:
    matrix = draw(rows, rank) @ draw(rank, columns)
    out = through(PowerSGD(4, [(rows, columns)]), matrix.ravel()).reshape(rows, columns)
    assert np.linalg.norm(out - matrix) <= 0.02 * np.linalg.norm(matrix)


def test_iterations_come_near_the_best_approximation_of_that_rank() -> None:
    matrix = draw(60, 40) @ np.diag(0.8 ** np.arange(40)).astype(np.float32)
    best = np.sqrt((np.linalg.svd(matrix, compute_uv=False)[4:] ** 2).sum())
    codec = PowerSGD(4, [(60, 40)])
    errors = [np.linalg.norm(through(codec, matrix.ravel()) - matrix.ravel()) for _ in range(6)]
    assert errors[-1] <= 1.02 * best < errors[0]


def test_vectors_and_small_matrices_travel_as_bf16() -> None:
    values = draw(30 + 16)
    out = through(PowerSGD(4, [(30,), (4, 4)]), values)
    np.testing.assert_array_equal(out, values.astype(bfloat16).astype(np.float32))


def test_zeros_stay_zeros_and_what_follows_them_is_encoded() -> None:
    codec = PowerSGD(2, [(20, 30)])
    zeros = np.zeros(600, np.float32)  # as the gradient of an adapter's A while B is zero
    for _ in range(3):
        np.testing.assert_array_equal(through(codec, zeros), zeros)
    matrix = draw(20, 2) @ draw(2, 30)
    out = through(codec, matrix.ravel())
    assert np.linalg.norm(out - matrix.ravel()) <= 0.02 * np.linalg.norm(matrix)


def test_no_order_of_sums_depends_on_the_processor() -> None:
    codec = PowerSGD(3, [(50, 2000)])  # several pieces
    matrix = draw(50, 2000)
    encoded = codec.encode(0, matrix.ravel())
    left, right = np.split(encoded.view(bfloat16).astype(np.float32), [3 * 50])
    left, right = left.reshape(3, 50, 1), right.reshape(3, 1, 2000)
    expected = (left[0] * right[0] + left[1] * right[1]) + left[2] * right[2]
    out = np.empty(100_000, np.float32)
    codec.decode(encoded, out)
    np.testing.assert_array_equal(out.reshape(50, 2000), expected)


@pytest.mark.parametrize("off", [-2, 2])
def test_a_wrong_length_is_refused(off: int) -> None:
    codec = PowerSGD(2, [(20, 30)])
    with pytest.raises(ProtocolError, match="bytes came"):
        codec.decode(np.zeros(codec.nbytes(600) + off, np.uint8), np.empty(600, np.float32))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_factor_that_is_not_finite_is_refused(value: float) -> None:
    codec = PowerSGD(2, [(20, 30)])
    encoded = codec.encode(0, draw(600))
    encoded[10:12] = np.array([value], bfloat16).view(np.uint8)
    with pytest.raises(ProtocolError, match="not finite"):
        codec.decode(encoded, np.empty(600, np.float32))


@pytest.mark.parametrize(("place", "value"), [(0, 1.0078125), (2 * 20, 2.0**127)])
def test_a_factor_whose_product_could_overflow_is_refused(place: int, value: float) -> None:
    codec = PowerSGD(2, [(20, 30)])
    encoded = codec.encode(0, draw(600))
    encoded.view(bfloat16)[place] = value
    with pytest.raises(ProtocolError, match="too large"):
        codec.decode(encoded, np.empty(600, np.float32))


@given(st.binary(min_size=2 * 2 * (9 + 8), max_size=2 * 2 * (9 + 8)))
def test_any_bytes_are_refused_or_decode_to_finite_values(encoded: bytes) -> None:
    out = np.empty(72, np.float32)
    try:
        PowerSGD(2, [(9, 8)]).decode(np.frombuffer(encoded, np.uint8), out)
    except ProtocolError:
        return
    assert np.isfinite(out).all()
