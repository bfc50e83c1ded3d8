"""The sum of a step's gradients: contributions come in chunks, averages go out as bytes.

Contributions are added in the order of their samples, so the same split gives the same bits. Those
at the beginning of that order are added as they come; what came before its turn waits.
The average leaves as encoded bytes, and all members, the coordinator too, decode those bytes.
"""

from __future__ import annotations

import math
import mmap
import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from trainer.config.codec import find_codec
from trainer.exchange.coordinator.ledger import Shard
from trainer.exchange.protocol.blocks import BlockAssembly, make_block_frames
from trainer.exchange.protocol.codecs import Codec, SenderCodec
from trainer.exchange.protocol.wire import MAX_WEIGHT, Frame, MessageType
from trainer.model.layout import GradientLayout
from trainer.optimizer.adamw import square_sum
from trainer.system.errors import NonFiniteError, ProtocolError
from trainer.system.passes import compiled_library

Float32 = NDArray[np.float32]

_DECODED = np.empty(0, np.uint8)
"""The bytes of a contribution that waits where the sum will be."""


class ReusedArray:
    """Gives out fp32 arrays `[n]`, one after another in the same memory if the last one is gone.

    New pages from the system cost more time than a sum.

    An array is free when nothing refers to it, no view of it and no frame that is queued.
    While one is in use the next has memory of its own, so at most one gradient is kept for later.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._spare: list[Float32] = []

    def take_array(self) -> Float32:
        """Return an array; its values are arbitrary."""
        memory = self._spare.pop() if self._spare else self._allocate()
        # Views of an array over a buffer keep that array alive, and not only the memory behind it.
        array = np.frombuffer(memory.data, np.float32)
        weakref.finalize(array, self._recycle_memory, memory).atexit = False
        return array

    def _allocate(self) -> Float32:
        """Return new memory outside of malloc's heap, where what others free leaves holes."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        return np.frombuffer(mmap.mmap(-1, 4 * self._size, flags), np.float32)

    def _recycle_memory(self, memory: Float32) -> None:
        """Take memory back, in whichever thread dropped it."""
        self._spare[:] = [memory]


class BlockVector:
    """A vector of which each block is an array of its own, so that each is gone by itself.

    A block that a slow reader has yet to be sent would keep a whole vector otherwise.
    """

    def __init__(self, starts: Sequence[int], size: int, block: Callable[[int], Float32]) -> None:
        """`block` returns a block, valid until the next one is asked for."""
        self._starts, self._block = starts, block
        self.size = size
        self._latest = (-1, np.empty(0, np.float32))

    def __getitem__(self, span: slice) -> Float32:
        """Return a range, valid until the next one; a view if it lies within one block."""
        start, stop, _ = span.indices(self.size)
        first = bisect_right(self._starts, start) - 1
        last = bisect_left(self._starts, stop) - 1
        if first == last:
            begin = self._starts[first]
            return self._load_block(first)[start - begin : stop - begin]
        found = np.empty(stop - start, np.float32)
        for block in range(first, last + 1):
            begin = self._starts[block]
            part = self._load_block(block)[max(start - begin, 0) : stop - begin]
            at = max(begin, start) - start
            found[at : at + part.size] = part
        return found

    def _load_block(self, block: int) -> Float32:
        if self._latest[0] != block:
            self._latest = (block, self._block(block))
        return self._latest[1]


@dataclass(frozen=True, eq=False)
class Contribution:
    """One shard's gradient sum of one block, and its weight."""

    decode: Callable[[], Float32]
    """Returns it as fp32, in memory that the next contribution is decoded into."""
    weight: int
    squares: float
    """The sum of squares; inf where that overflows single precision, in which NumPy adds."""

    @property
    def norm(self) -> float:
        """The L2 norm, to about three digits."""
        return math.sqrt(self.squares if self.squares < math.inf else square_sum(self.decode()))


@dataclass(frozen=True)
class Average:
    """An averaged block as it goes to all workers."""

    block: int
    encoded: NDArray[np.uint8]
    codec: Codec
    weight: int


def _identity(values: Float32) -> Float32:
    return values


class SumMemory:
    """Buffers for the sums of consecutive steps: two blocks, and in fp32 one gradient.

    An average in fp32 is sent, and applied, from where its sum was made. That memory is used again
    once the average was sent to everyone.
    """

    def __init__(self, layout: GradientLayout) -> None:
        largest = max(block.size for block in layout.blocks)
        self.blocks = [ReusedArray(block.size) for block in layout.blocks]
        self.decoded = np.empty(largest, np.float32)
        self.spare = np.empty(largest, np.float32)
        self.lend: Callable[[int], Float32 | None] = lambda _: None
        """Returns memory for a block's fp32 average that workers here read, if it is free."""

    def take_block(self, block: int) -> Float32:
        """Return memory for a block's sum; its values are arbitrary."""
        lent = self.lend(block)
        return self.blocks[block].take_array() if lent is None else lent


class GradientSum:
    """All contributions to one step, `[N]` fp32 when complete.

    A contribution whose turn has not come waits as the bytes that came, but in fp32 the first one
    of a block waits where the sum will be. Those whose turn has come are added as soon as that
    takes less memory than they do. Averages in fp32 stay where they were made; of all others the
    encoded bytes are kept, and decoded again for the update.

    Args:
        codec: that contributions come in, and averages go in.
        in_bf16: whether a quantised codec gives way to bf16.
        second_moments: those of a round follow, as blocks of their own.
        memory: that of all steps of a run; its own if there is none.
    """

    def __init__(
        self,
        layout: GradientLayout,
        codec: SenderCodec,
        step: int,
        *,
        in_bf16: bool = False,
        second_moments: bool = False,
        memory: SumMemory | None = None,
    ) -> None:
        self.layout = layout.with_second_moments if second_moments else layout
        self._updates = len(layout.blocks)
        self.step = step
        self._in_bf16 = in_bf16
        self._agreed = codec
        self._memory = memory or SumMemory(self.layout)
        self._sums: dict[int, Float32] = {}
        self.averages: dict[int, Average] = {}
        self.bytes_received = 0
        self.partial: dict[tuple[int, int], BlockAssembly] = {}
        """Contributions that are not whole yet, by block and shard."""
        self._whole: dict[int, dict[int, BlockAssembly]] = {}
        """Whole contributions that wait for others, by block and shard, in order of arrival."""
        self._begun: dict[int, tuple[int, int]] = {}
        """Added contributions of each block, and their weight."""
        self._square_sums: dict[int, float] = {}

    @property
    def gradient(self) -> BlockVector:
        """The averaged gradient, once all blocks are in `averages`."""
        starts = [block.start for block in self.layout.blocks]
        return BlockVector(starts, self.layout.size, self._decode_average)

    @property
    def norm(self) -> float:
        """The global L2 norm of the averaged update; the order of its blocks does not matter."""
        squares = self._square_sums.items()
        return math.sqrt(math.fsum(of for block, of in squares if block < self._updates))

    def check_block(self, frame: Frame) -> None:
        """Check that the block of a frame exists.

        Raises:
            ProtocolError: there is no such block.
        """
        if frame.block >= len(self.layout.blocks):
            raise ProtocolError(f"block {frame.block} of {len(self.layout.blocks)}")

    def add_frame(self, frame: Frame) -> Contribution | None:
        """Add a gradient frame and return its contribution if that is whole now.

        Raises:
            ProtocolError: codec, block, offset, length or weight is wrong.
            NonFiniteError: the contribution holds a NaN or Inf.
        """
        key = (frame.block, frame.shard)
        assembly = self.partial.get(key)
        if assembly is None:
            codec = self._agreed.find_codec(frame.codec, in_bf16=self._in_bf16)
            size = self.layout.blocks[frame.block].size
            assembly = BlockAssembly(codec, size, frame.weight)
            self.partial[key] = assembly
        self.bytes_received += len(frame.payload)
        if not assembly.add_frame(frame):
            return None
        del self.partial[key]
        waiting = self._whole.setdefault(frame.block, {})
        if frame.block in self._sums or not self._is_exact:
            decode = partial(self._decode_contribution, frame.block, assembly)
        else:
            values = self._sum_buffer(frame.block)
            assembly.codec.decode(assembly.bytes, values)
            assembly.bytes = _DECODED
            decode = partial(_identity, values)
        squares = self._compute_square_sum(frame.block, assembly, decode, f"rank {frame.rank}")
        waiting[frame.shard] = assembly
        return Contribution(decode, assembly.weight, squares)

    def discard_partial(self, shard: int) -> None:
        """Drop the unfinished contributions of a shard whose worker was lost."""
        for key in [key for key in self.partial if key[1] == shard]:
            del self.partial[key]

    def add_leading(self, block: int, leading: Sequence[Shard]) -> None:
        """Add the first contributions of a block's order, if their sum is smaller than they are."""
        added, weight = self._begun.get(block, (0, 0))
        parts = [self._whole[block][shard.id] for shard in leading[added:]]
        size = self.layout.blocks[block].size
        if not added and sum(part.codec.encoded_size(size) for part in parts) <= 4 * size:
            return
        self._add_to(self._sum_buffer(block, stays=True), block, parts)
        for shard in leading[added:]:
            del self._whole[block][shard.id]
        self._begun[block] = len(leading), weight + sum(part.weight for part in parts)

    def average_block(self, block: int, order: Sequence[Shard]) -> Average:
        """Add the contributions of `order`, divide by their weight, and encode.

        Raises:
            NonFiniteError: the sum overflowed.
        """
        added, weight = self._begun.get(block, (0, 0))
        parts = [self._whole[block][shard.id] for shard in order[added:]]
        weight += sum(part.weight for part in parts)
        codec = self._agreed.codec
        names = {codec.name, *(part.codec.name for part in parts)}
        if compiled_library.PASSES and names == {"bf16"} and not added:
            encoded, squares = compiled_library.PASSES.bf16_average(
                [part.bytes for part in parts], weight or 1
            )
        else:
            codec, encoded, squares = self._sum_and_encode(block, parts, weight)
        del self._whole[block]
        if not math.isfinite(squares):  # no finite singles overflow a double
            values = self._memory.decoded[: self.layout.blocks[block].size]
            codec.decode(encoded, values)
            raise self._non_finite_error(block, values, "the average")
        self._square_sums[block] = squares
        self.averages[block] = Average(block, encoded, codec, min(weight, MAX_WEIGHT))
        return self.averages[block]

    def _sum_and_encode(
        self, block: int, parts: list[BlockAssembly], weight: int
    ) -> tuple[Codec, NDArray[np.uint8], float]:
        """Return a block's average encoded, with its codec, and the sum of its squares."""
        out = self._sum_buffer(block)
        self._add_to(out, block, parts)
        if weight:
            np.divide(out, np.float32(weight), out=out)
        codec, encoded = self._encode_average(block, out)
        if not self._is_exact:
            self._sums.pop(block, None)
        return codec, encoded, square_sum(out)

    def _add_to(self, out: Float32, block: int, parts: list[BlockAssembly]) -> None:
        """Add contributions to what was added of their block, or make the first one its sum."""
        if block not in self._begun:
            first, *parts = parts
            if first.bytes is not _DECODED:
                for waiting in self._whole[block].values():
                    if waiting.bytes is _DECODED:  # its turn comes later
                        in_turn = waiting in parts
                        kept = self._memory.spare[: out.size] if in_turn else np.empty_like(out)
                        kept[:] = out
                        waiting.bytes = kept.view(np.uint8)
                first.codec.decode(first.bytes, out)
        with np.errstate(over="ignore"):  # an overflow is found, and named, when all are added
            for other in parts:
                np.add(out, self._decode_contribution(block, other), out=out)

    def make_frames(self, average: Average, generation: int) -> Iterator[Frame]:
        """Yield the frames that carry an average to one member."""
        encoded, codec = average.encoded, average.codec
        kind, weight = MessageType.AVERAGED_GRADIENT, average.weight
        return make_block_frames(kind, encoded, generation, self.step, average.block, codec, weight)

    def _encode_average(self, block: int, values: Float32) -> tuple[Codec, NDArray[np.uint8]]:
        """Encode an average, and replace it by what all members decode."""
        if self._is_exact:
            return self._agreed.codec, values.view(np.uint8)
        codec, encoded = self._agreed.encode(block, values, in_bf16=self._in_bf16)
        codec.decode(encoded, values)
        return codec, encoded

    def _decode_average(self, block: int) -> Float32:
        """Return an average as all members decode it; valid until the next one is decoded."""
        if block in self._sums:
            return self._sums[block]
        average = self.averages[block]
        values = self._memory.decoded[: self.layout.blocks[block].size]
        average.codec.decode(average.encoded, values)
        return values

    @property
    def _is_exact(self) -> bool:
        return find_codec(self._agreed.codec.name).is_exact

    def _sum_buffer(self, block: int, *, stays: bool = False) -> Float32:
        """Return the buffer of a block's sum; other than in fp32 it does not stay there.

        Args:
            stays: until the rest of it is added.
        """
        size = self.layout.blocks[block].size
        if block not in self._sums:
            if self._is_exact:
                self._sums[block] = self._memory.take_block(block)
            elif stays:
                self._sums[block] = np.empty(size, np.float32)
            else:
                return self._memory.spare[:size]
        return self._sums[block]

    def _decode_contribution(self, block: int, whole: BlockAssembly) -> Float32:
        """Return a contribution that is not in the sum's buffer; valid until the next one."""
        if find_codec(whole.codec.name).is_exact:
            return whole.bytes.view(np.float32)
        values = self._memory.decoded[: self.layout.blocks[block].size]
        whole.codec.decode(whole.bytes, values)
        return values

    def _compute_square_sum(
        self, block: int, whole: BlockAssembly, decode: Callable[[], Float32], source: str
    ) -> float:
        """Return the sum of squares, inf where that overflows, of values that are all finite."""
        if compiled_library.PASSES and find_codec(whole.codec.name).sums_encoded:
            squares = compiled_library.PASSES.bf16_square_sum(whole.bytes)
            if math.isfinite(squares):  # no finite singles overflow a double
                return squares
            raise self._non_finite_error(block, decode(), source)
        values = decode()
        with np.errstate(over="ignore", invalid="ignore"):
            squares = float(np.dot(values, values))
        if math.isfinite(squares) or np.isfinite(values).all():
            return squares
        raise self._non_finite_error(block, values, source)

    def _non_finite_error(self, block: int, values: Float32, source: str) -> NonFiniteError:
        where = int(np.argmin(np.isfinite(values)))
        tensor = self.layout.find_tensor(block, where)
        name = self.layout.blocks[block].name
        what = f"{source} sent {values[where]} in block {name}, tensor {tensor.name}"
        return NonFiniteError.at_step(self.step + 1, what)
