"""Groups of micro-batches, of which each part of a recording runs all in its turn.

A layer that is written at each use is then written once a direction for a whole group, and its
gradients are final at its turn in backward. Chunks of prompts run so, too. Recordings share their
memory, so what a part leaves for a later one waits in memory of its own. Every sum is over
micro-batches in their order, as where one micro-batch after the other runs all parts: the bits are
the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.replica.wgpu.batch import PackedBatch
from trainer.replica.wgpu.gpu.array import Array
from trainer.replica.wgpu.gpu.pool import MemoryPool
from trainer.replica.wgpu.kernels.embedding import Words
from trainer.replica.wgpu.recordings import Recording


@dataclass(frozen=True)
class Member:
    """A micro-batch of a group."""

    micro: PackedBatch
    recording: Recording
    words: Words | None
    """Tokens whose rows of the embedding it has; None: the device has all."""
    vector_start: int
    """Byte of a step's upload where its vector begins."""
    first_sample: int
    """Samples of a step before its own."""

    @property
    def rows(self) -> int:
        """Its tokens, padding included."""
        return self.micro.bucket.rows

    def list_segments(self, part: str) -> list[str]:
        """Return the segments of a part, without chunks of targets that are empty."""
        names = self.recording.parts[part].segments
        if part != "head":
            return names
        each = len(names) // self.micro.bucket.chunks
        return names[: max(1, self.micro.chunks) * each]


Group = Sequence[Member]


def split_groups(members: Sequence[Member], tokens: int) -> list[list[Member]]:
    """Return members in groups of at most so many tokens; each has one member at least."""
    groups: list[list[Member]] = []
    room = 0
    for member in members:
        if not groups or member.rows > room:
            groups.append([])
            room = tokens
        groups[-1].append(member)
        room -= member.rows
    return groups


class WaitingMemory:
    """Memory for what waits between the parts of one group: an array for each of its values.

    Args:
        pool: where it is taken. `release` frees all that has been taken there, and so does growing.
    """

    def __init__(self, pool: MemoryPool) -> None:
        self.pool = pool
        self._arrays: dict[str, Array] = {}
        self._rows = 0

    def reserve_rows(self, rows: int, recording: Recording) -> None:
        """Take memory for groups of so many tokens, unless there is enough.

        Raises:
            OutOfMemoryError: it does not fit.
        """
        widths = {
            name: array.nbytes // recording.rows
            for part in recording.parts.values()
            for name, array in part.left.items()
        }
        if rows <= self._rows and widths.keys() <= self._arrays.keys():
            return
        widths |= {name: 4 * array.shape[1] for name, array in self._arrays.items()}
        rows = max(rows, self._rows)
        if self._arrays:
            self.release()
        for name, width in widths.items():
            self._arrays[name] = self.pool.take((rows, width // 4), purpose="waiting")
        self._rows = rows

    def release(self) -> None:
        """Free all of it."""
        self.pool.release()
        self._arrays, self._rows = {}, 0

    def encode_loads(self, encoder: Any, recording: Recording, part: str, row: int) -> None:
        """Encode copies of what a part takes from the group's rows from `row` on."""
        for waiting, array in self._find_windows(recording.parts[part].taken, row):
            encode_copy(encoder, waiting, array)

    def encode_saves(self, encoder: Any, recording: Recording, part: str, row: int) -> None:
        """Encode copies of what a part leaves to the group's rows from `row` on."""
        for waiting, array in self._find_windows(recording.parts[part].left, row):
            encode_copy(encoder, array, waiting)

    def _find_windows(self, values: dict[str, Array], row: int) -> Iterator[tuple[Array, Array]]:
        """Yield where each value waits, and its array in the recording."""
        for name, array in values.items():
            whole = self._arrays[name]
            offset = whole.offset + row * 4 * whole.shape[1]
            yield Array(whole.buffer, array.shape, offset=offset), array


def encode_copy(encoder: Any, source: Array, target: Array) -> None:
    """Encode a copy of an array to one of the same bytes."""
    encoder.copy_buffer_to_buffer(
        source.buffer, source.offset, target.buffer, target.offset, source.nbytes
    )
