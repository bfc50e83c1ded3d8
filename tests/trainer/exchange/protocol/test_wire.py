"""Frames: what is sent arrives once, in order and whole, or the connection ends."""

from __future__ import annotations

import struct
import tracemalloc
import zlib
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.exchange.protocol.wire import (
    HEADER_SIZE,
    MAX_CONTROL,
    MAX_PAYLOAD,
    TENSOR_TYPES,
    Frame,
    FrameDecoder,
    FrameEncoder,
    MessageType,
    run_tag,
)
from trainer.system.errors import ProtocolError

RUN = run_tag("run-1")

HEADER = struct.Struct("<4sBBBBIIIHHIIIQI")
"""magic, version, type, codec, flags, run, generation, step, rank, block, shard, sequence, ..."""

FRAMES = st.builds(
    Frame,
    type=st.sampled_from(MessageType),
    payload=st.binary(max_size=200),
    generation=st.integers(0, 2**32 - 1),
    step=st.integers(0, 2**32 - 1),
    rank=st.integers(0, 2**16 - 1),
    block=st.integers(0, 2**16 - 1),
    shard=st.integers(0, 2**32 - 1),
    weight=st.integers(0, 2**32 - 1),
    offset=st.integers(0, 2**64 - 1),
    codec=st.integers(0, 255),
)


def feed(decoder: FrameDecoder, data: bytes) -> list[Frame]:
    """Receive bytes as a socket would: into the free space, as much as fits."""
    frames: list[Frame] = []
    while data:
        space = decoder.free_space()
        assert len(space) > 0
        count = min(len(space), len(data))
        space[:count] = data[:count]
        data = data[count:]
        if frame := decoder.advance(count):
            frames.append(frame)
    return frames


def stream(frames: Sequence[Frame], run: int = RUN) -> bytes:
    encoder = FrameEncoder(run)
    return b"".join(as_bytes(encoder, frame) for frame in frames)


def as_bytes(encoder: FrameEncoder, frame: Frame) -> bytes:
    return b"".join(encoder.encode(frame))


def header(**changes: int | bytes) -> bytes:
    """Return a header with a right checksum whatever it says, and no payload behind it."""
    fields: dict[str, int | bytes] = {
        "magic": b"MTLY",
        "version": 12,
        "type": int(MessageType.HEARTBEAT),
        "codec": 0,
        "flags": 0,
        "run": RUN,
        "generation": 0,
        "step": 0,
        "rank": 0,
        "block": 0,
        "shard": 0,
        "sequence": 0,
        "weight": 0,
        "offset": 0,
        "length": 0,
    }
    packed = HEADER.pack(*{**fields, **changes}.values())
    return packed + struct.pack("<I", zlib.crc32(packed))


SMALL = [
    Frame(MessageType.HEARTBEAT, b"{}", generation=3),
    Frame(MessageType.GRADIENT, b"\x01\x02\x03\x04", 3, 7, 1, 2, 9, 5, 16, 1),
    Frame(MessageType.SHUTDOWN, b"", 3),
]


# What arrives


@given(st.lists(FRAMES, max_size=8), st.data())
def test_any_split_of_the_bytes_gives_the_same_frames(frames: list[Frame], data: st.DataObject):
    encoded = stream(frames)
    cuts = data.draw(st.lists(st.integers(0, len(encoded)), max_size=20).map(sorted))
    decoder = FrameDecoder(RUN)
    received: list[Frame] = []
    for start, stop in zip([0, *cuts], [*cuts, len(encoded)], strict=True):
        received += feed(decoder, encoded[start:stop])
    assert received == frames
    assert not decoder.is_mid_frame


@pytest.mark.parametrize("kind", sorted(MessageType))
def test_the_largest_frame_of_every_type(kind: MessageType):
    size = MAX_PAYLOAD if kind in TENSOR_TYPES else MAX_CONTROL
    frames = [Frame(kind, bytes([number]) * size) for number in range(3)]
    decoder = FrameDecoder(RUN)
    decoder.accept_tensors()
    encoded = stream(frames)
    received: list[Frame] = []
    for start in range(0, len(encoded), 100_001):
        received += feed(decoder, encoded[start : start + 100_001])
    assert received == frames


def test_the_sequence_wraps_around():
    encoder, decoder = FrameEncoder(RUN), FrameDecoder(RUN)
    encoder._sequence = decoder._sequence = 2**32 - 1
    assert len(feed(decoder, as_bytes(encoder, SMALL[0]) + as_bytes(encoder, SMALL[0]))) == 2


# What is cut off


def test_a_stream_cut_at_every_byte_invents_no_frame():
    ends, encoder, encoded = [0], FrameEncoder(RUN), b""
    for frame in SMALL:
        encoded += as_bytes(encoder, frame)
        ends.append(len(encoded))
    for cut in range(len(encoded) + 1):
        decoder = FrameDecoder(RUN)
        whole = sum(end <= cut for end in ends[1:])
        assert feed(decoder, encoded[:cut]) == SMALL[:whole]
        assert decoder.is_mid_frame == (cut not in ends)


# What is damaged


@pytest.mark.parametrize("victim", range(len(SMALL)))
def test_every_flipped_bit_is_noticed(victim: int):
    encoder = FrameEncoder(RUN)
    parts = [as_bytes(encoder, frame) for frame in SMALL]
    before = b"".join(parts[:victim])
    # Behind it comes enough for a length that was flipped to anything allowed.
    after = b"".join(parts[victim + 1 :]) + bytes(MAX_PAYLOAD)
    for bit in range(8 * len(parts[victim])):
        damaged = bytearray(parts[victim])
        damaged[bit // 8] ^= 1 << bit % 8
        decoder = FrameDecoder(RUN)
        decoder.accept_tensors()
        assert feed(decoder, before) == SMALL[:victim]
        with pytest.raises(ProtocolError):
            feed(decoder, bytes(damaged) + after)


@given(st.binary(min_size=HEADER_SIZE, max_size=300))
def test_garbage_is_refused(garbage: bytes):
    if garbage[:4] == b"MTLY":
        return
    with pytest.raises(ProtocolError, match="magic"):
        feed(FrameDecoder(RUN), garbage)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"magic": b"HTTP"}, "does not use Motley's protocol"),
        ({"version": 2}, "version 2, this side 12: install the same Motley"),
        ({"type": 0}, "unknown message type 0"),
        ({"type": 200}, "unknown message type 200"),
        ({"flags": 1}, "unknown flags 0x1"),
        ({"run": RUN ^ 1}, "another run"),
        ({"sequence": 1}, "received frame 1, expected 0"),
    ],
)
def test_a_wrong_header_with_a_right_checksum(changes: dict[str, int | bytes], reason: str):
    assert feed(FrameDecoder(RUN), header()) == [Frame(MessageType.HEARTBEAT)]
    with pytest.raises(ProtocolError, match=reason):
        feed(FrameDecoder(RUN), header(**changes))


def test_replayed_reordered_and_skipped_frames():
    encoder = FrameEncoder(RUN)
    first, second, third = (as_bytes(encoder, frame) for frame in SMALL)
    for wrong in ([first, first], [second, first], [first, third], [first, second, first]):
        with pytest.raises(ProtocolError, match="expected"):
            feed(FrameDecoder(RUN), b"".join(wrong))


# What a peer claims


@pytest.mark.parametrize(
    "length", [MAX_CONTROL + 1, MAX_PAYLOAD, MAX_PAYLOAD + 1, 2**31, 2**32 - 1]
)
@pytest.mark.parametrize("kind", sorted(MessageType))
def test_a_claimed_length_allocates_nothing_before_it_was_checked(kind: MessageType, length: int):
    for admitted in (False, True):
        decoder = FrameDecoder(RUN)
        if admitted:
            decoder.accept_tensors()
        claim = header(type=int(kind), length=length)
        if admitted and kind in TENSOR_TYPES and length <= MAX_PAYLOAD:
            assert feed(decoder, claim) == []
            assert len(decoder.free_space()) == length
        else:
            tracemalloc.start()
            with pytest.raises(ProtocolError, match=f"{length} bytes, at most"):
                feed(decoder, claim)
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert peak < MAX_CONTROL


@settings(max_examples=30)
@given(st.lists(st.integers(0, MAX_PAYLOAD), min_size=1, max_size=4), st.booleans())
def test_a_decoder_never_holds_more_than_one_frame(sizes: list[int], admitted: bool):
    limit = MAX_PAYLOAD if admitted else MAX_CONTROL
    decoder = FrameDecoder(RUN)
    if admitted:
        decoder.accept_tensors()
    frames = [Frame(MessageType.STATE, bytes(size % (limit + 1))) for size in sizes]
    assert feed(decoder, stream(frames)) == frames
    assert len(decoder.free_space()) == HEADER_SIZE


@pytest.mark.parametrize("kind", [MessageType.HEARTBEAT, MessageType.STATE])
def test_we_never_send_what_the_other_side_refuses(kind: MessageType):
    limit = MAX_PAYLOAD if kind in TENSOR_TYPES else MAX_CONTROL
    with pytest.raises(AssertionError):
        FrameEncoder(RUN).encode(Frame(kind, bytes(limit + 1)))


def test_runs_have_tags_of_their_own():
    assert run_tag("run-1") != run_tag("run-2")
    assert 0 <= run_tag("") < 2**32
