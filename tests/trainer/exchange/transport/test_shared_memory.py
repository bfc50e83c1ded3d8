"""Gradients in memory that two processes map: found whole, never overwritten too soon."""

from __future__ import annotations

import gc
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from trainer.exchange.protocol.wire import Frame, FrameDecoder, FrameEncoder, MessageType
from trainer.exchange.transport.shared_memory import (
    Averages,
    CoordinatorEnd,
    WorkerEnd,
    is_supported,
)
from trainer.system.errors import ProtocolError

pytestmark = pytest.mark.skipif(not is_supported(), reason="no sealed anonymous files here")

SIZES = (64, 4096, 8)
Pair = tuple[CoordinatorEnd, WorkerEnd]
COMMIT = Frame(MessageType.STEP_COMMIT, b"{}")


@pytest.fixture
def averages() -> Iterator[Averages]:
    made = Averages(SIZES)
    yield made
    os.close(made.descriptor)


def connected(averages: Averages) -> Pair:
    """Return both ends of a connection."""
    end, (region, upload) = averages.open_connection()
    try:
        return end, WorkerEnd(SIZES, region, upload)
    finally:
        os.close(upload)


def gradient(block: int, fill: int, offset: int = 0, length: int | None = None) -> Frame:
    payload = memoryview(bytes([fill]) * (SIZES[block] if length is None else length))
    return Frame(MessageType.GRADIENT, payload, block=block, offset=offset)


def average(block: int, fill: int, step: int = 0) -> Frame:
    payload = memoryview(bytes([fill]) * SIZES[block])
    return Frame(MessageType.AVERAGED_GRADIENT, payload, step=step, block=block)


def read(end: CoordinatorEnd | WorkerEnd, frame: Frame) -> bytes:
    """Return what the other end finds, as a link does: look up, handle, say that it is handled."""
    found = end.payload(frame.type, frame.block, frame.offset, len(frame.payload))
    kept = bytes(found)
    end.mark_consumed(frame)
    return kept


def test_gradients_and_averages_cross_without_a_socket(averages: Averages) -> None:
    coordinator, worker = connected(averages)
    for block, fill in ((0, 3), (2, 4), (1, 5)):
        assert worker.place_payload(gradient(block, fill))
        assert read(coordinator, gradient(block, fill)) == bytes([fill]) * SIZES[block]
        assert coordinator.place_payload(average(block, fill + 50))
        assert read(worker, average(block, 0)) == bytes([fill + 50]) * SIZES[block]


def test_a_block_may_come_in_parts(averages: Averages) -> None:
    coordinator, worker = connected(averages)
    assert worker.place_payload(gradient(1, 1, 0, 4000))
    assert worker.place_payload(gradient(1, 2, 4000, 96))
    assert read(coordinator, gradient(1, 0)) == bytes([1]) * 4000 + bytes([2]) * 96


def test_a_gradient_keeps_its_place_until_the_commit(averages: Averages) -> None:
    """The coordinator adds it from there, so a second shard's goes through the socket."""
    coordinator, worker = connected(averages)
    assert worker.place_payload(gradient(0, 1))
    found = coordinator.payload(MessageType.GRADIENT, 0, 0, SIZES[0])
    assert not worker.place_payload(gradient(0, 2))
    assert worker.place_payload(gradient(2, 2))
    assert bytes(found) == bytes([1]) * SIZES[0]
    worker.mark_consumed(COMMIT)
    assert worker.place_payload(gradient(0, 3))


def test_an_average_keeps_its_place_until_all_have_taken_it(averages: Averages) -> None:
    """Whoever is behind holds nobody up: the others get the next one through their sockets."""
    (fast, fast_worker), (slow, slow_worker) = connected(averages), connected(averages)
    for end in (fast, slow):
        assert end.place_payload(average(0, 1, step=4))
    assert read(fast_worker, average(0, 0)) == bytes([1]) * SIZES[0]
    assert not fast.place_payload(average(0, 2, step=5))
    assert fast.place_payload(average(1, 2, step=5))
    assert read(slow_worker, average(0, 0)) == bytes([1]) * SIZES[0]
    assert fast.place_payload(average(0, 3, step=6))
    assert slow.place_payload(average(0, 3, step=6))
    assert read(slow_worker, average(0, 0)) == bytes([3]) * SIZES[0]


def lent(averages: Averages) -> np.ndarray:
    place = averages.lend_buffer(0)
    assert place is not None
    return place


def made_in(place: np.ndarray, fill: int, step: int, block: int = 0) -> Frame:
    """Return an average whose sum was made where the workers read it."""
    view = place.view(np.uint8)
    view[:] = fill
    return Frame(MessageType.AVERAGED_GRADIENT, view.data, step=step, block=block)


def test_an_average_that_was_made_in_its_place_is_not_copied(averages: Averages) -> None:
    coordinator, worker = connected(averages)
    place = lent(averages)
    frame = made_in(place, 1, step=4)
    assert coordinator.place_payload(frame)
    assert read(worker, average(0, 0)) == bytes([1]) * SIZES[0]
    place[:] = 0  # the same memory
    assert not any(worker.payload(frame.type, 0, 0, SIZES[0]))


def test_a_place_is_lent_again_when_nothing_refers_to_its_average(averages: Averages) -> None:
    """Neither a frame that a slow link has yet to send, nor a worker that has yet to read it."""
    coordinator, worker = connected(averages)
    place = lent(averages)
    late = made_in(place, 1, step=4)
    del place
    assert averages.lend_buffer(0) is None
    assert coordinator.place_payload(late)
    del late
    assert averages.lend_buffer(0) is None
    assert read(worker, average(0, 0)) == bytes([1]) * SIZES[0]
    assert averages.lend_buffer(0) is not None


def test_an_average_that_was_made_elsewhere_leaves_a_lent_place_alone(averages: Averages) -> None:
    coordinator, worker = connected(averages)
    place = lent(averages)
    late = made_in(place, 1, step=4)
    assert coordinator.place_payload(late)
    assert read(worker, average(0, 0)) == bytes([1]) * SIZES[0]
    assert not coordinator.place_payload(average(0, 2, step=5))
    assert bytes(late.payload) == bytes([1]) * SIZES[0]


def test_a_slow_link_does_not_name_a_place_that_was_lent_since(averages: Averages) -> None:
    """Its copy was there for the others, who have taken it; a sum of the next step is there now."""
    (fast, fast_worker), (slow, _) = connected(averages), connected(averages)
    copied = average(0, 1, step=4)
    assert fast.place_payload(copied)
    assert read(fast_worker, average(0, 0)) == bytes([1]) * SIZES[0]
    place = lent(averages)
    assert not slow.place_payload(copied)
    assert fast.place_payload(made_in(place, 2, step=5))


def test_a_lost_worker_holds_no_place(averages: Averages) -> None:
    (lost, _), (other, other_worker) = connected(averages), connected(averages)
    assert lost.place_payload(average(0, 1, step=0))
    assert not other.place_payload(average(0, 2, step=1))
    lost.close()
    assert other.place_payload(average(0, 2, step=1))
    assert read(other_worker, average(0, 0)) == bytes([2]) * SIZES[0]


def test_the_memory_of_a_lost_worker_is_given_back(averages: Averages) -> None:
    def regions() -> int:
        gc.collect()
        return Path("/proc/self/maps").read_text(encoding="utf-8").count("memfd:motley-upload")

    before = regions()
    coordinator, worker = connected(averages)
    assert coordinator.place_payload(average(0, 1))
    assert regions() == before + 2
    coordinator.close()
    del worker
    assert regions() == before


def test_the_memory_of_a_lost_coordinator_is_given_back(averages: Averages) -> None:
    """At once: an error and its traceback may keep the end itself until the next collection."""

    def regions() -> int:
        return Path("/proc/self/maps").read_text(encoding="utf-8").count("memfd:motley-")

    coordinator, worker = connected(averages)
    assert coordinator.place_payload(average(0, 1))
    found = worker.payload(MessageType.AVERAGED_GRADIENT, 0, 0, SIZES[0])
    before = regions()
    worker.close()
    assert regions() == before - 1, "an average that is still to be read stays"
    assert bytes(found) == bytes([1]) * SIZES[0]
    del found
    assert regions() == before - 2
    worker.mark_consumed(average(0, 0))  # the end came while its last frame was handled
    assert not worker.place_payload(gradient(0, 1))
    with pytest.raises(ProtocolError):
        worker.payload(MessageType.AVERAGED_GRADIENT, 0, 0, SIZES[0])


def test_what_a_lost_worker_left_can_still_be_added(averages: Averages) -> None:
    coordinator, worker = connected(averages)
    worker.place_payload(gradient(1, 7))
    found = coordinator.payload(MessageType.GRADIENT, 1, 0, SIZES[1])
    coordinator.close()
    del worker
    assert bytes(found) == bytes([7]) * SIZES[1]
    with pytest.raises(ProtocolError):
        coordinator.payload(MessageType.GRADIENT, 1, 0, SIZES[1])


@pytest.mark.parametrize("kind", sorted(MessageType))
def test_only_tensors_of_the_right_direction_are_shared(
    averages: Averages, kind: MessageType
) -> None:
    coordinator, worker = connected(averages)
    up, down = kind is MessageType.GRADIENT, kind is MessageType.AVERAGED_GRADIENT
    frame = Frame(kind, memoryview(bytes(8)), block=2)
    assert (worker.place_payload(frame), coordinator.place_payload(frame)) == (up, down)
    for end, wanted in ((coordinator, up), (worker, down)):
        if wanted:
            assert len(end.payload(kind, 2, 0, 8)) == 8
        else:
            with pytest.raises(ProtocolError):
                end.payload(kind, 2, 0, 8)


@pytest.mark.parametrize(
    ("block", "offset", "length"), [(3, 0, 1), (65535, 0, 0), (0, 1, 64), (2, 8, 1), (0, 2**63, 1)]
)
def test_nothing_outside_a_block_is_read(
    averages: Averages, block: int, offset: int, length: int
) -> None:
    coordinator, worker = connected(averages)
    with pytest.raises(ProtocolError):
        coordinator.payload(MessageType.GRADIENT, block, offset, length)
    with pytest.raises(ProtocolError):
        worker.payload(MessageType.AVERAGED_GRADIENT, block, offset, length)


def test_a_worker_can_neither_write_averages_nor_shrink_anything(averages: Averages) -> None:
    """To read beyond the end of a file that shrank is SIGBUS."""
    _, (region, upload) = averages.open_connection()
    try:
        for descriptor in (region, upload):
            with pytest.raises(PermissionError):
                os.ftruncate(descriptor, 0)
            with pytest.raises(PermissionError):
                os.ftruncate(descriptor, 10**6)
        with pytest.raises(PermissionError):
            mmap.mmap(region, 8, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        with pytest.raises(PermissionError):
            os.write(region, b"x")
    finally:
        os.close(upload)


def test_the_frames_beside_it_carry_headers_alone(averages: Averages) -> None:
    coordinator, worker = connected(averages)
    frame = gradient(1, 9)
    assert worker.place_payload(frame)
    header, payload = FrameEncoder(1).encode(frame, shared=True)
    assert payload == b""
    decoder = FrameDecoder(1, shared=coordinator)
    decoder.accept_tensors()
    decoder.free_space()[:] = header
    received = decoder.advance(len(header))
    assert received is not None
    assert bytes(received.payload) == bytes([9]) * SIZES[1]
    assert (received.block, received.offset) == (1, 0)
