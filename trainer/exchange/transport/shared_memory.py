"""Gradients between processes of one host: in memory that both map, not through a socket.

Each worker writes its blocks into an upload region of its own, and the coordinator adds them from
there. All workers read averages from one region: in fp32 they are made there, others are copied.
Every block has a fixed place, so the frames that travel beside (flag SHARED) carry no address that
would have to be trusted. A payload whose place is still in use goes through the socket instead:
shared memory changes the speed, never the meaning.

A region is an anonymous file (`memfd_create`): it has no name, only processes that were handed its
descriptor can map it, and it is gone with the last of them, however they end. Seals keep its size,
since to read beyond the end of a file that shrank would kill the process, and only let the
coordinator write averages.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from trainer.exchange.protocol.wire import Frame, MessageType
from trainer.system.errors import ProtocolError

Float32 = NDArray[np.float32]

_SEAL_FUTURE_WRITE = 0x10
"""Linux's F_SEAL_FUTURE_WRITE, which `fcntl` does not name: no new mapping may write."""
_NO_STEP = -1
_COUNTER = 64
"""Bytes before the blocks of an upload region: how many averages its worker has taken."""


def is_supported() -> bool:
    """Return whether this system has anonymous files that can be sealed (Linux 5.1)."""
    return hasattr(os, "memfd_create") and hasattr(fcntl, "F_ADD_SEALS")


class Region:
    """One encoded gradient in memory; `start` bytes lie before its first block."""

    def __init__(self, descriptor: int, sizes: Sequence[int], start: int, *, write: bool) -> None:
        """Map the file behind a descriptor, which may be closed afterwards.

        Raises:
            OSError, ValueError: it cannot be mapped, or is too small.
        """
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if write else 0)
        length = start + sum(sizes)
        self.bytes = memoryview(mmap.mmap(descriptor, length, prot=protection))
        self._sizes = sizes
        self._starts = list(accumulate(sizes, initial=start))

    def view_part(self, block: int, offset: int, length: int) -> memoryview:
        """Return part of an encoded block.

        Raises:
            ProtocolError: it is not inside the block.
        """
        if block >= len(self._sizes) or offset + length > self._sizes[block]:
            raise ProtocolError(f"block {block}: bytes {offset}..{offset + length} of none")
        begin = self._starts[block] + offset
        return self.bytes[begin : begin + length]

    def copy_payload(self, frame: Frame) -> None:
        """Copy a payload to its place."""
        self.view_part(frame.block, frame.offset, len(frame.payload))[:] = frame.payload


class Averages:
    """The coordinator's region of averages, and which workers have yet to read what is in it."""

    def __init__(self, sizes: Sequence[int]) -> None:
        """Make the region.

        Raises:
            OSError: the system refuses it.
        """
        self._sizes = sizes
        self.descriptor = _create_memfd("motley-averages", sum(sizes))
        self._region = Region(self.descriptor, sizes, 0, write=True)
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _SEAL_FUTURE_WRITE)
        self._steps = [_NO_STEP] * len(sizes)
        """Per block the step whose average is in its place."""
        self._offsets: list[set[int]] = [set() for _ in sizes]
        self._readers: list[dict[CoordinatorEnd, int]] = [{} for _ in sizes]
        self._lent: list[weakref.ref[Float32] | None] = [None for _ in sizes]

    def open_connection(self) -> tuple[CoordinatorEnd, list[int]]:
        """Return the end of a new connection, and the descriptors that its worker maps.

        The second descriptor is the caller's to close.

        Raises:
            OSError: the system refuses another region.
        """
        upload = _create_memfd("motley-upload", _COUNTER + sum(self._sizes))
        return CoordinatorEnd(self, Region(upload, self._sizes, _COUNTER, write=False)), [
            self.descriptor,
            upload,
        ]

    def lend_buffer(self, block: int) -> Float32 | None:
        """Return the buffer of an fp32 average, for it to be made there; None while it is in use.

        It is in use as long as anything refers to the array, or a reader has an average to take.
        """
        if self._is_lent(block) or not self._all_taken(block):
            return None
        place = np.frombuffer(self._region.view_part(block, 0, self._sizes[block]), np.float32)
        # Views of an array over a buffer keep that array alive, and not only the memory behind it.
        self._lent[block] = weakref.ref(place)
        self._steps[block] = _NO_STEP  # what a copy had put there, and a slow link still would name
        return place

    def place_average(self, reader: CoordinatorEnd, frame: Frame) -> bool:
        """Put an average where all readers find it; return False while its buffer is in use."""
        block, offsets = frame.block, self._offsets[frame.block]
        if self._steps[block] != frame.step:
            in_place = self._is_lent(block)
            if not self._all_taken(block) or (in_place and not self._lies_in_region(frame)):
                return False
            self._steps[block] = frame.step
            self._readers[block].clear()
            offsets.clear()
        if frame.offset not in offsets:
            if not self._lies_in_region(frame):
                self._region.copy_payload(frame)
            offsets.add(frame.offset)
        self._readers[block][reader] = reader.count_average()
        return True

    def _all_taken(self, block: int) -> bool:
        return all(end.has_taken(count) for end, count in self._readers[block].items())

    def _is_lent(self, block: int) -> bool:
        lent = self._lent[block]
        return lent is not None and lent() is not None

    def _lies_in_region(self, frame: Frame) -> bool:
        place = self._region.view_part(frame.block, frame.offset, len(frame.payload))
        return np.may_share_memory(np.asarray(place), np.asarray(frame.payload))


class CoordinatorEnd:
    """The coordinator's end of one connection."""

    patient = True
    """Averages may wait for the commit that makes use of them."""

    def __init__(self, averages: Averages, upload: Region) -> None:
        self._averages = averages
        self._upload: Region | None = upload
        self._taken: memoryview | None = upload.bytes[:8].cast("Q")
        self._sent = 0

    def place_payload(self, frame: Frame) -> bool:
        """Put an average into shared memory, if it is one and its place is free."""
        return frame.type is MessageType.AVERAGED_GRADIENT and self._averages.place_average(
            self, frame
        )

    def payload(self, kind: MessageType, block: int, offset: int, length: int) -> memoryview:
        """Return a gradient where the worker wrote it."""
        if kind is not MessageType.GRADIENT or self._upload is None:
            raise ProtocolError(f"{kind.name} in shared memory")
        return self._upload.view_part(block, offset, length)

    def mark_consumed(self, frame: Frame) -> None:
        """Do nothing: gradients stay in use until the commit of their step."""

    def count_average(self) -> int:
        """Count one more average that the worker finds in shared memory."""
        self._sent += 1
        return self._sent

    def has_taken(self, count: int) -> bool:
        """Return whether the worker has taken so many averages, or never will."""
        return self._taken is None or self._taken[0] >= count

    def close(self) -> None:
        """Forget the region; gradients that are still to be added stay readable."""
        self._upload = self._taken = None


class WorkerEnd:
    """A worker's end of its connection."""

    patient = False
    """Others wait for gradients."""

    def __init__(self, sizes: Sequence[int], averages: int, upload: int) -> None:
        """Map the regions behind two descriptors.

        Raises:
            OSError, ValueError: they cannot be mapped.
        """
        self._averages: Region | None = Region(averages, sizes, 0, write=False)
        self._upload: Region | None = Region(upload, sizes, _COUNTER, write=True)
        self._taken: memoryview | None = self._upload.bytes[:8].cast("Q")
        self._found = 0
        """Averages that were found in shared memory."""
        self._used: set[tuple[int, int]] = set()

    def place_payload(self, frame: Frame) -> bool:
        """Put a gradient into shared memory, if it is one and the first in its place this step."""
        place = (frame.block, frame.offset)
        if frame.type is not MessageType.GRADIENT or place in self._used or self._upload is None:
            return False
        self._upload.copy_payload(frame)
        self._used.add(place)
        return True

    def payload(self, kind: MessageType, block: int, offset: int, length: int) -> memoryview:
        """Return an average where the coordinator wrote it."""
        if kind is not MessageType.AVERAGED_GRADIENT or self._averages is None:
            raise ProtocolError(f"{kind.name} in shared memory")
        self._found += 1
        return self._averages.view_part(block, offset, length)

    def mark_consumed(self, frame: Frame) -> None:
        """Release a handled frame: its average, and with a commit all gradients."""
        if self._taken is not None:
            self._taken[0] = self._found
        if frame.type is MessageType.STEP_COMMIT:
            self._used.clear()

    def close(self) -> None:
        """Forget both regions; averages that are still to be read stay readable."""
        self._averages = self._upload = self._taken = None


SharedBlocks = CoordinatorEnd | WorkerEnd


def _create_memfd(name: str, length: int) -> int:
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, length)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return descriptor
