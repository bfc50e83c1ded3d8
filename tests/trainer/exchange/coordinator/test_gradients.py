"""Sums of contributions: in the order of samples, weighted, checked, and nothing kept too long."""

from __future__ import annotations

import tracemalloc
from itertools import permutations

import numpy as np
import pytest

from benchmarks.rig import synthetic
from tests.trainer.exchange.exact_problem import tiny_layout
from trainer.exchange.coordinator.gradient_sum import GradientSum, SumMemory
from trainer.exchange.coordinator.ledger import Ledger, Shard
from trainer.exchange.policies.feedback import make_sender_codec
from trainer.exchange.protocol.blocks import make_block_frames
from trainer.exchange.protocol.codecs import make_codec
from trainer.exchange.protocol.wire import MessageType
from trainer.system.errors import NonFiniteError, ProtocolError

pytestmark = pytest.mark.usefixtures("small_frames")

LAYOUT = tiny_layout()
SHARDS = [Shard(7, 2, 0, 3), Shard(3, 0, 3, 4), Shard(5, 1, 4, 9)]
MORE_SHARDS = [*SHARDS, Shard(4, 3, 9, 10), Shard(6, 4, 10, 14)]


def frames(values: np.ndarray, shard: Shard, weight: int, codec: str = "fp32", block: int = 0):
    chosen = make_codec(codec)
    encoded = chosen.encode(values)
    kind = MessageType.GRADIENT
    return list(make_block_frames(kind, encoded, 1, 3, block, chosen, weight, shard.rank, shard.id))


def drawn(shard: Shard, scale: float = 1.0) -> np.ndarray:
    random = np.random.default_rng(shard.id)
    return (scale * random.standard_normal(LAYOUT.blocks[0].size)).astype(np.float32)


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("shards", [SHARDS, MORE_SHARDS], ids=["3", "5"])
def test_the_order_of_arrival_does_not_matter(codec: str, shards: list[Shard]):
    """Nor what was added before the others came: the bits are those of a sum in one go."""
    results: set[bytes] = set()
    for arrival in permutations(shards):
        sums = GradientSum(LAYOUT, make_sender_codec(codec, LAYOUT), step=3)
        ledger = Ledger(1, shards)
        for shard in arrival:
            whole = [sums.add_frame(f) for f in frames(drawn(shard), shard, shard.size, codec)]
            assert [w is not None for w in whole] == [False] * (len(whole) - 1) + [True]
            ledger.record_contribution(shard.id, 0)
            if not ledger.is_complete(0):
                sums.add_leading(0, ledger.list_leading(0))
        average = sums.average_block(0, ledger.list_counted(0))
        assert average.weight == sum(shard.size for shard in shards)
        results.add(average.encoded.tobytes())
    assert results == {summed_in_order(codec, [(drawn(shard), shard.size) for shard in shards])}


def summed_in_order(codec: str, parts: list[tuple[np.ndarray, int]]) -> bytes:
    """Return the average of contributions to block 0 as NumPy makes it, one after another."""
    chosen = make_codec(codec)
    total, decoded = np.zeros(10, np.float32), np.empty(10, np.float32)
    for values, _ in parts:
        chosen.decode(chosen.encode(values), decoded)
        total += decoded
    total /= np.float32(sum(weight for _, weight in parts))
    return make_sender_codec(codec, LAYOUT).encode(0, total)[1].tobytes()


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8"])
def test_a_sum_that_was_begun_is_the_same_when_workers_are_lost(codec: str):
    """F-DP-002: what came of a lost worker stays, and what it owes keeps its place in the order."""
    begun, random = 0, np.random.default_rng(0)
    for _ in range(50):
        sums = GradientSum(LAYOUT, make_sender_codec(codec, LAYOUT), step=3)
        ledger = Ledger(1, [Shard(rank, rank, 8 * rank, 8 * rank + 8) for rank in range(5)])
        pending, free = ledger.initial_shards, 5
        while pending:
            shard = pending.pop(random.integers(len(pending)))
            if shard.size > 1 and random.random() < 0.4:
                middle = int(random.integers(shard.start + 1, shard.stop))
                pieces = [
                    Shard(free, 0, shard.start, middle),
                    Shard(free + 1, 1, middle, shard.stop),
                ]
                ledger.replace_shard(shard.id, pieces)
                pending += pieces
                free += 2
                continue
            for frame in frames(drawn(shard), shard, shard.size, codec):
                sums.add_frame(frame)
            ledger.record_contribution(shard.id, 0)
            if not ledger.is_complete(0):
                leading = ledger.list_leading(0)
                assert leading == ledger.list_counted(0)[: len(leading)]
                sums.add_leading(0, leading)
                begun += len(leading) > 1
        order = ledger.list_counted(0)
        assert [shard.start for shard in order] == sorted(shard.start for shard in order)
        expected = summed_in_order(codec, [(drawn(shard), shard.size) for shard in order])
        assert sums.average_block(0, order).encoded.tobytes() == expected
    assert begun > 50


@pytest.mark.parametrize(
    ("codec", "first", "gradients"),
    [
        ("fp32", 1, 3.0),
        ("bf16", 1, 2.0),
        ("int8", 1, 1.06),
        ("fp32", 0, 0.0),  # beside the sum, whose memory a step before this one made
        ("bf16", 0, 1.0),
        ("int8", 0, 1.0),
    ],
)
def test_what_waits_for_a_late_worker_takes_little_memory(
    codec: str, first: int, gradients: float, monkeypatch: pytest.MonkeyPatch
):
    """If the first is late, all are kept as they came, but in fp32 one is where the sum will be."""
    # Several frames a block, not thousands.
    monkeypatch.setattr("trainer.exchange.protocol.blocks.CHUNK", 4096)
    layout = synthetic.layout(36 * 16000)
    agreed = make_sender_codec(codec, layout)
    memory, values = SumMemory(layout), np.ones(16000, np.float32)
    earlier = [
        block.take_array() for block in memory.blocks
    ]  # a step before this one made the memory
    del earlier
    tracemalloc.start()
    sums = GradientSum(layout, agreed, step=3, memory=memory)
    for block in layout.blocks:
        for number in range(first, first + 4):
            encoded = agreed.codec.encode(values)
            for frame in make_block_frames(
                MessageType.GRADIENT,
                encoded,
                1,
                3,
                block.index,
                agreed.codec,
                1,
                MORE_SHARDS[number].rank,
                MORE_SHARDS[number].id,
            ):
                sums.add_frame(frame)
            sums.add_leading(block.index, [] if first else MORE_SHARDS[: number + 1])
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept / values.nbytes / 36 == pytest.approx(gradients, abs=0.12)


@pytest.mark.parametrize(("codec", "gradients"), [("bf16", 0.5), ("int8", 0.27)])
def test_averages_are_kept_as_they_are_sent(codec: str, gradients: float):
    layout = synthetic.layout(36 * 16000)
    agreed, random = make_sender_codec(codec, layout), np.random.default_rng(0)
    sums = GradientSum(layout, agreed, step=3)
    kind, expected = MessageType.GRADIENT, np.empty(layout.size, np.float32)
    tracemalloc.start()
    for block in layout.blocks:
        chosen = agreed.codec
        encoded = chosen.encode(random.standard_normal(16000, np.float32))
        for frame in make_block_frames(kind, encoded, 1, 3, block.index, chosen, 1, 2, 7):
            sums.add_frame(frame)
        del frame, encoded
        average = sums.average_block(block.index, SHARDS[:1])
        average.codec.decode(average.encoded, expected[block.start : block.stop])
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept / layout.size / 4 == pytest.approx(gradients, abs=0.06)
    for span in (slice(0, 5), slice(15990, 16010), slice(15990, 48010), slice(0, layout.size)):
        assert sums.gradient[span].tobytes() == expected[span].tobytes()


def test_a_sum_that_is_still_being_sent_is_not_overwritten():
    memory = SumMemory(LAYOUT)
    sent: list[np.ndarray] = []
    for step in range(3):
        sums = GradientSum(LAYOUT, make_sender_codec("fp32", LAYOUT), step=step, memory=memory)
        for frame in frames(np.full(10, step + 1, np.float32), SHARDS[0], 1):
            sums.add_frame(frame)
        average = sums.average_block(0, SHARDS[:1])
        sent.append(np.frombuffer(average.encoded.data[:16], np.float32))
    assert [values.tolist() for values in sent] == [[1.0] * 4, [2.0] * 4, [3.0] * 4]
    address = sent[-1].ctypes.data
    del sums, average, sent[:2]
    sent.clear()
    assert memory.blocks[0].take_array().ctypes.data == address


def test_a_block_that_is_still_being_sent_keeps_no_other():
    layout = synthetic.layout(36 * 16000)
    memory, agreed = SumMemory(layout), make_sender_codec("fp32", layout)
    sums = GradientSum(layout, agreed, step=1, memory=memory)
    values = np.ones(16000, np.float32)
    for block in layout.blocks:
        fp32 = agreed.codec
        kind = MessageType.GRADIENT
        for frame in make_block_frames(kind, fp32.encode(values), 1, 1, block.index, fp32, 1):
            sums.add_frame(frame)
        sums.average_block(block.index, [Shard(0, 0, 0, 1)])
    where = [average.encoded.ctypes.data for average in sums.averages.values()]
    late = sums.averages[7].encoded.data
    del sums
    found = [block.take_array().ctypes.data for block in memory.blocks]
    assert [index for index, at in enumerate(where) if found[index] != at] == [7]
    assert np.frombuffer(late, np.float32).tolist() == values.tolist()


def test_pieces_of_several_contributions_may_alternate():
    sums = GradientSum(LAYOUT, make_sender_codec("fp32", LAYOUT), step=3)
    streams = [frames(drawn(shard), shard, shard.size) for shard in SHARDS]
    for pieces in zip(*streams, strict=True):
        for frame in pieces:
            sums.add_frame(frame)
    sums.average_block(0, SHARDS)
    total = sum((drawn(shard).astype(np.float64) for shard in SHARDS), np.zeros(10))
    applied = sums.averages[0].encoded.view(np.float32)
    np.testing.assert_allclose(applied, total / 9, rtol=1e-6)
    assert sums.norm == pytest.approx(np.linalg.norm(total / 9), rel=1e-6)


@pytest.mark.parametrize("codec", ["fp32", "bf16"])
def test_what_is_sent_is_what_is_applied_here(codec: str):
    sums = GradientSum(LAYOUT, make_sender_codec(codec, LAYOUT), step=3)
    for frame in frames(drawn(SHARDS[0]), SHARDS[0], 3, codec):
        sums.add_frame(frame)
    average = sums.average_block(0, SHARDS[:1])
    for block in LAYOUT.blocks[1:]:
        chosen = make_codec(codec)
        kind = MessageType.GRADIENT
        zeros = chosen.encode(np.zeros(block.size, np.float32))
        for frame in make_block_frames(kind, zeros, 1, 3, block.index, chosen, 3, 2, 7):
            sums.add_frame(frame)
        sums.average_block(block.index, SHARDS[:1])
    received = np.empty(10, np.float32)
    make_codec(codec).decode(average.encoded.copy(), received)
    assert received.tobytes() == sums.gradient[:10].tobytes()
    assert sums.gradient[:12].tolist() == [*received, 0.0, 0.0]
    assert len(list(sums.make_frames(average, generation=1))) == len(average.encoded) // 16 + 1


def test_no_weight_at_all_divides_by_nothing():
    """A shard can hold no target token; its gradient is zero then."""
    sums = GradientSum(LAYOUT, make_sender_codec("fp32", LAYOUT), step=3)
    for frame in frames(np.zeros(10, np.float32), SHARDS[0], 0):
        sums.add_frame(frame)
    assert not sums.average_block(0, SHARDS[:1]).encoded.any()


def test_what_a_lost_worker_left_unfinished_is_dropped():
    sums = GradientSum(LAYOUT, make_sender_codec("fp32", LAYOUT), step=3)
    lost, other = SHARDS[:2]
    for shard in (lost, other):
        first, *rest = frames(drawn(shard), shard, 1)
        sums.add_frame(first)
    sums.discard_partial(lost.id)
    assert {shard for _, shard in sums.partial} == {other.id}
    for frame in rest:
        sums.add_frame(frame)
    assert not sums.partial
    with pytest.raises(ProtocolError, match=r"bytes 16\.\.32 came, 0 of 40 are here"):
        sums.add_frame(frames(drawn(lost), lost, 1)[1])


def test_sums_that_overflow_halt_and_do_not_warn():
    sums = GradientSum(LAYOUT, make_sender_codec("fp32", LAYOUT), step=3)
    largest = np.full(10, np.finfo(np.float32).max, np.float32)
    for shard in SHARDS:
        for frame in frames(largest, shard, 1):
            sums.add_frame(frame)
    with pytest.raises(NonFiniteError, match=r"step 4: the average .* layers.0, tensor layers.0.q"):
        sums.average_block(0, SHARDS)


@pytest.mark.parametrize("offset", range(10))
def test_the_tensor_of_a_nan_is_named(offset: int):
    sums = GradientSum(LAYOUT, make_sender_codec("bf16", LAYOUT), step=3)
    values = drawn(SHARDS[0])
    values[offset] = np.nan
    tensor = "layers.1.q" if offset < 6 else "layers.1.v"
    *some, last = frames(values, SHARDS[0], 1, "bf16", block=1)
    for frame in some:
        sums.add_frame(frame)
    with pytest.raises(NonFiniteError, match=f"rank 2 sent nan in block layers.1, tensor {tensor}"):
        sums.add_frame(last)
