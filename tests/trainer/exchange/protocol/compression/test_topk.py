"""top-k: which values travel, in how many bytes, and bytes that lie."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from ml_dtypes import bfloat16

from trainer.exchange.protocol.compression.topk import CHUNK, TopK, largest
from trainer.system.errors import ProtocolError

FINITE = st.floats(-(2.0**100), 2.0**100, width=32)


def draw(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


def through(codec: TopK, values: np.ndarray) -> np.ndarray:
    encoded = codec.encode(0, values)
    assert encoded.nbytes == codec.nbytes(values.size)
    out = np.full(values.size, 777, np.float32)
    codec.decode(encoded, out)
    return out


def refused(codec: TopK, encoded: np.ndarray, elements: int, message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        codec.decode(encoded, np.empty(elements, np.float32))


@given(arrays.arrays(np.float32, st.integers(1, 400), elements=FINITE), st.data())
def test_the_largest_by_their_upper_bits_and_of_equal_ones_the_first(
    values: np.ndarray, data: st.DataObject
) -> None:
    count = data.draw(st.integers(1, values.size))
    keys = (values.view(np.uint32) >> 16) & 0x7FFF
    expected = np.sort(np.lexsort((np.arange(values.size), -keys.astype(int)))[:count])
    np.testing.assert_array_equal(largest(values, count), expected)


@given(
    st.lists(st.integers(1, 3000), min_size=1, max_size=4),
    st.sampled_from([0.5, 0.1, 0.01, 0.001]),
    st.integers(0, 1000),
)
def test_each_tensor_keeps_its_own_largest_as_bf16(
    sizes: list[int], density: float, seed: int
) -> None:
    values = draw(sum(sizes), seed)
    out = through(TopK(density, [(size,) for size in sizes]), values)
    start = 0
    for size in sizes:
        tensor, found = values[start : start + size], out[start : start + size]
        kept = np.flatnonzero(found)
        assert len(kept) == max(1, round(density * size))
        np.testing.assert_array_equal(kept, largest(tensor, len(kept)))
        np.testing.assert_array_equal(found[kept], tensor[kept].astype(bfloat16))
        start += size


@given(st.lists(st.integers(1, 1 << 24), min_size=1), st.sampled_from([0.5, 0.1, 0.01, 0.001]))
def test_bytes_follow_the_formula(sizes: list[int], density: float) -> None:
    expected = 0
    for size in sizes:
        kept = max(1, round(density * size))
        expected += 2 * kept + min(-(-size // 8), 2 * kept + 4 * -(-size // CHUNK))
    assert TopK(density, [(size,) for size in sizes]).nbytes(sum(sizes)) == expected


@pytest.mark.parametrize(("density", "bytes_an_element"), [(0.1, 0.325), (0.01, 0.04)])
def test_bytes_an_element_are_those_of_the_documents(
    density: float, bytes_an_element: float
) -> None:
    found = TopK(density, [(1 << 22,)]).nbytes(1 << 22) / (1 << 22)
    assert found == pytest.approx(bytes_an_element, abs=1e-4)


@pytest.mark.parametrize("density", [0.1, 0.01])
def test_a_tensor_of_several_chunks(density: float) -> None:
    values = draw(2 * CHUNK + 777)
    values[CHUNK : 2 * CHUNK] = 0  # a chunk of which nothing is kept
    out = through(TopK(density, [(values.size,)]), values)
    kept = np.flatnonzero(out)
    np.testing.assert_array_equal(kept, largest(values, len(kept)))


def test_zeros_and_the_largest_fp32_travel() -> None:
    zeros = np.zeros(100, np.float32)
    np.testing.assert_array_equal(through(TopK(0.1, [(100,)]), zeros), zeros)
    zeros[7] = np.finfo(np.float32).max
    out = through(TopK(0.1, [(100,)]), zeros)
    assert np.isfinite(out).all()
    assert out[7] == pytest.approx(zeros[7], rel=1 / 256)


@pytest.mark.parametrize("off", [-1, 1])
def test_a_wrong_length_is_refused(off: int) -> None:
    codec = TopK(0.1, [(100,)])
    refused(codec, np.zeros(codec.nbytes(100) + off, np.uint8), 100, "bytes came")


class TestBitmap:
    codec = TopK(0.1, [(100,)])  # 13 bytes of bitmap, the last with 4 bits to spare, and 10 values

    def encoded(self) -> np.ndarray:
        return self.codec.encode(0, draw(100))

    def test_one_value_more_is_refused(self) -> None:
        encoded = self.encoded()
        marks = np.unpackbits(encoded[:13], bitorder="little")
        marks[np.flatnonzero(marks[:100] == 0)[0]] = 1
        encoded[:13] = np.packbits(marks, bitorder="little")
        refused(self.codec, encoded, 100, "marks 11 values, 10 are due")

    def test_one_value_less_is_refused(self) -> None:
        encoded = self.encoded()
        marks = np.unpackbits(encoded[:13], bitorder="little")
        marks[np.flatnonzero(marks)[0]] = 0
        encoded[:13] = np.packbits(marks, bitorder="little")
        refused(self.codec, encoded, 100, "marks 9 values, 10 are due")

    def test_a_mark_beyond_the_tensor_is_refused(self) -> None:
        encoded = self.encoded()
        encoded[12] |= 0x10
        refused(self.codec, encoded, 100, "beyond its tensor")

    @pytest.mark.parametrize("bits", [0x7FC0, 0x7F81, 0x7F80, 0xFF80])  # NaN, signalling; Inf
    def test_a_value_that_is_not_finite_is_refused(self, bits: int) -> None:
        encoded = self.encoded()
        encoded[-2:] = np.array([bits], "<u2").view(np.uint8)
        refused(self.codec, encoded, 100, "not finite")


class TestIndices:
    size = 2 * CHUNK - 100
    codec = TopK(0.001, [(size,)])  # two counts, 131 indices, 131 values

    def encoded(self) -> np.ndarray:
        return self.codec.encode(0, draw(self.size))

    def indices(self, encoded: np.ndarray) -> np.ndarray:
        return encoded[8 : 8 + 2 * 131].view("<u2")

    def test_the_same_index_twice_is_refused(self) -> None:
        encoded = self.encoded()
        self.indices(encoded)[1] = self.indices(encoded)[0]
        refused(self.codec, encoded, self.size, "not above the one before")

    def test_indices_out_of_order_are_refused(self) -> None:
        encoded = self.encoded()
        self.indices(encoded)[:2] = self.indices(encoded)[[1, 0]]
        refused(self.codec, encoded, self.size, "not above the one before")

    def test_an_index_beyond_the_tensor_is_refused(self) -> None:
        encoded = self.encoded()
        self.indices(encoded)[-1] = CHUNK - 1
        refused(self.codec, encoded, self.size, f"index {2 * CHUNK - 1} of a tensor")

    @pytest.mark.parametrize("counts", [(131, 1), (0, 0), (2**32 - 1, 2**32 - 1), (132, 2**32 - 1)])
    def test_counts_that_do_not_add_up_are_refused(self, counts: tuple[int, int]) -> None:
        encoded = self.encoded()
        encoded[:8].view("<u4")[...] = counts
        refused(self.codec, encoded, self.size, "131 are due")


@given(st.lists(st.integers(1, 200), min_size=1, max_size=3), st.data())
def test_any_bytes_are_refused_or_decode_to_as_many_finite_values(
    sizes: list[int], data: st.DataObject
) -> None:
    codec, elements = TopK(0.02, [(size,) for size in sizes]), sum(sizes)
    size = codec.nbytes(elements)
    encoded = np.frombuffer(data.draw(st.binary(min_size=size, max_size=size)), np.uint8)
    out = np.empty(elements, np.float32)
    try:
        codec.decode(encoded, out)
    except ProtocolError:
        return
    assert np.isfinite(out).all()
    assert np.count_nonzero(out) <= sum(max(1, round(0.02 * size)) for size in sizes)
