"""int8 and int4: their bytes, their error, and bytes that no encoder writes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from trainer.exchange.protocol.codecs import Codec
from trainer.exchange.protocol.quantized import Int4, Int8
from trainer.system.errors import ProtocolError

FINITE = arrays.arrays(
    np.float32,
    st.integers(1, 600),
    elements=st.one_of(
        st.floats(-1, 1, width=32),
        st.floats(allow_nan=False, allow_infinity=False, width=32),  # subnormals and the largest
    ),
)


def through(codec: Codec, values: np.ndarray) -> np.ndarray:
    encoded = codec.encode(values)
    assert encoded.nbytes == codec.encoded_size(values.size)
    out = np.full(values.size, 777, np.float32)
    codec.decode(encoded, out)
    return out


def group_maxima(values: np.ndarray, group: int) -> np.ndarray:
    """Return for each value the largest magnitude of its group, fp64."""
    found = np.zeros(values.size)
    for start in range(0, values.size, group):
        found[start : start + group] = np.abs(values[start : start + group].astype(float)).max()
    return found


@given(st.integers(0, 1 << 32))
def test_bytes_follow_the_formulas(elements: int) -> None:
    assert Int8().encoded_size(elements) == elements + 4 * -(-elements // 256)
    assert Int4().encoded_size(elements) == -(-elements // 2) + -(-elements // 32)


def test_bytes_an_element_are_those_of_the_documents() -> None:
    assert Int8().encoded_size(1 << 20) / (1 << 20) == pytest.approx(1.016, abs=5e-4)
    assert Int4().encoded_size(1 << 20) / (1 << 20) == pytest.approx(0.531, abs=5e-4)


@given(FINITE)
def test_int8_is_off_by_half_a_scale_at_most(values: np.ndarray) -> None:
    largest = group_maxima(values, 256)
    bound = largest / 127 / 2 * (1 + 1e-5) + 127 * np.finfo(np.float32).tiny
    # Above 127/128 of the largest fp32 a scale is held down, or a product would overflow.
    cut = largest > np.finfo(np.float32).max * (127 / 128)
    bound[cut] = largest[cut] / 64
    assert (np.abs(values.astype(float) - through(Int8(), values)) <= bound).all()


@given(FINITE)
def test_int4_is_off_by_two_fifteenths_of_its_groups_largest(values: np.ndarray) -> None:
    largest = group_maxima(values, 32)
    bound = largest * (2 / 15) * (1 + 1e-6) + 16 * np.finfo(np.float32).tiny
    cut = largest > 7.5 * 2.0**124  # the last exponent holds 7 * 2^124
    bound[cut] = largest[cut]
    assert (np.abs(values.astype(float) - through(Int4(), values)) <= bound).all()


@settings(max_examples=30)
@given(FINITE, st.sampled_from([Int8, Int4]))
def test_what_was_decoded_is_encoded_to_nearly_the_same(values: np.ndarray, kind: type) -> None:
    once = through(kind(), values)
    again = through(kind(), once)
    if kind is Int4:  # powers of two: exact, but where the largest of a group lost its exponent
        same = group_maxima(once, 32) >= 3.75 * group_maxima(values, 32) / 4
        np.testing.assert_array_equal(again[same], once[same])
    else:
        np.testing.assert_allclose(again, once, rtol=1e-5, atol=1e-36)


@pytest.mark.parametrize("kind", [Int8, Int4])
def test_several_pieces_and_a_short_group_decode_in_place(kind: type) -> None:
    values = np.random.default_rng(1).standard_normal(2 * 64 * 1024 + 33).astype(np.float32)
    out = through(kind(), values)
    whole = [through(kind(), values[s : s + 256]) for s in range(0, values.size, 256)]
    np.testing.assert_array_equal(out, np.concatenate(whole))


@pytest.mark.parametrize("kind", [Int8, Int4])
@pytest.mark.parametrize("off", [-1, 1, 100])
def test_a_wrong_length_is_refused(kind: type, off: int) -> None:
    codec = kind()
    with pytest.raises(ProtocolError, match=r"block of \d+ bytes, expected"):
        codec.decode(np.zeros(codec.encoded_size(300) + off, np.uint8), np.empty(300, np.float32))


@pytest.mark.parametrize("scale", [np.nan, np.inf, -np.inf, -1.0, np.finfo(np.float32).max])
def test_a_scale_that_is_no_scale_is_refused(scale: float) -> None:
    encoded = Int8().encode(np.ones(300, np.float32))
    signalling = np.array([0x7F800001], "<u4").view(np.uint8)
    encoded[4:8] = signalling if np.isnan(scale) else np.array([scale], "<f4").view(np.uint8)
    with pytest.raises(ProtocolError, match="scale is negative, too large or not a number"):
        Int8().decode(encoded, np.empty(300, np.float32))


@pytest.mark.parametrize("exponent", [254, 255])
def test_an_exponent_that_could_overflow_is_refused(exponent: int) -> None:
    encoded = Int4().encode(np.ones(70, np.float32))
    encoded[2] = exponent
    with pytest.raises(ProtocolError, match=f"exponent {exponent}"):
        Int4().decode(encoded, np.empty(70, np.float32))


@given(st.sampled_from([Int8, Int4]), st.integers(1, 300), st.data())
def test_any_bytes_are_refused_or_decode_to_finite_values(
    kind: type, elements: int, data: st.DataObject
) -> None:
    codec = kind()
    encoded = np.frombuffer(
        data.draw(
            st.binary(min_size=codec.encoded_size(elements), max_size=codec.encoded_size(elements))
        ),
        np.uint8,
    )
    out = np.empty(elements, np.float32)
    try:
        codec.decode(encoded, out)
    except ProtocolError:
        return
    assert np.isfinite(out).all()


@pytest.mark.parametrize("kind", [Int8, Int4])
def test_bytes_may_begin_at_any_address(kind: type) -> None:
    values = np.linspace(-3, 3, 1000, dtype=np.float32)
    encoded = kind().encode(values)
    shifted = np.concatenate([np.zeros(1, np.uint8), encoded])[1:]
    expected, out = through(kind(), values), np.empty(1000, np.float32)
    kind().decode(shifted, out)
    np.testing.assert_array_equal(out, expected)
