"""Codecs: fp32 is exact, bf16 rounds as torch does."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.exchange.protocol.codecs import make_codec

EDGES = np.array(
    [
        0x00000000,
        0x80000000,
        0x00000001,  # the smallest subnormal
        0x00008000,  # halfway to the smallest bf16 subnormal: ties to even, zero
        0x00008001,
        0x00018000,  # halfway, rounds up to even
        0x007FFFFF,  # the largest subnormal
        0x00800000,
        0x3F800000,
        0x3F808000,  # tie, down to even
        0x3F818000,  # tie, up to even
        0x7F7F7FFF,  # just below the tie to infinity
        0x7F7F8000,  # overflows to infinity
        0x7F7FFFFF,  # the largest finite
        0xFF7FFFFF,
        0x7F800000,
        0xFF800000,
        0x7F800001,  # a NaN whose payload lies in the lower half only
        0xFF800001,
        0x7FC00000,
        0x7FFFFFFF,  # a NaN whose carry would run into the sign
        0xFFFFFFFF,
    ],
    np.uint32,
)


def through(name: str, values: np.ndarray) -> np.ndarray:
    codec = make_codec(name)
    encoded = codec.encode(values)
    assert encoded.nbytes == codec.encoded_size(values.size)
    out = np.full(values.size, 777, np.float32)
    codec.decode(encoded, out)
    return out


def torch_bf16(values: np.ndarray) -> np.ndarray:
    import torch

    halves = torch.from_numpy(values.copy()).to(torch.bfloat16)
    return halves.view(torch.int16).numpy().view(np.uint16)


def random_bits(seed: int, count: int) -> np.ndarray:
    bits = np.random.default_rng(seed).integers(0, 2**32, count, np.uint32)
    return np.concatenate([EDGES, bits]).view(np.float32)


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=50))
def test_fp32_keeps_every_bit(bits: list[int]):
    values = np.array(bits, np.uint32).view(np.float32)
    assert through("fp32", values).tobytes() == values.tobytes()


def test_fp32_bytes_are_a_copy():
    values = np.ones(4, np.float32)
    encoded = make_codec("fp32").encode(values)
    values[:] = 2
    assert encoded.tobytes() == np.ones(4, "<f4").tobytes()


def test_bf16_rounds_every_bit_pattern_as_torch_does():
    values = random_bits(seed=1, count=200_000)
    ours = make_codec("bf16").encode(values).view("<u2")
    theirs = torch_bf16(values)
    numbers = ~np.isnan(values)
    np.testing.assert_array_equal(ours[numbers], theirs[numbers])


@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_nan_stays_nan_and_infinity_infinity(name: str):
    values = random_bits(seed=2, count=200_000)
    out = through(name, values)
    np.testing.assert_array_equal(np.isnan(out), np.isnan(values))
    infinite = np.isinf(values)
    assert infinite.any()
    np.testing.assert_array_equal(out[infinite], values[infinite])


def test_bf16_overflows_to_infinity_and_never_to_a_number():
    largest = np.array([np.finfo(np.float32).max, np.finfo(np.float32).min], np.float32)
    np.testing.assert_array_equal(through("bf16", largest), [np.inf, -np.inf])


@settings(max_examples=50)
@given(st.integers(0, 2**32 - 1))
def test_what_bf16_decoded_it_encodes_exactly(seed: int):
    once = through("bf16", random_bits(seed, 200))
    again = through("bf16", once)
    numbers = ~np.isnan(once)
    assert again[numbers].tobytes() == once[numbers].tobytes()
