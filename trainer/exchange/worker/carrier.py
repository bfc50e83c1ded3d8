"""The carrier's side: the gradients of one host's workers, added up and sent as one. Sans-IO.

One carrier belongs to one membership of its worker. The other workers of the host reach it by links
of their own, introduce themselves, and hand over their sums in fp32. What it holds of a link is
void when that link closes, and everything is when the membership ends.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from trainer.exchange.protocol import messages
from trainer.exchange.protocol.blocks import BlockAssembly
from trainer.exchange.protocol.codecs import Fp32
from trainer.exchange.protocol.messages import BlockParts, Part, ShardAssignment
from trainer.exchange.protocol.wire import Frame, MessageType
from trainer.exchange.worker.session import Committed, Event, Session
from trainer.model.layout import Block, GradientLayout
from trainer.system.errors import ProtocolError

Float32 = NDArray[np.float32]

_GRADIENTS = (MessageType.BLOCK_GRADIENT, MessageType.NON_BLOCK_GRADIENT)
_EXACT = Fp32()


@dataclass(frozen=True, eq=False)
class _Sum:
    """One shard's sum of one block."""

    step: int
    values: Float32
    weight: int


@dataclass
class _Peer:
    """A worker that hands over its gradients; what it handed over by (shard, block)."""

    rank: int
    generation: int
    sums: dict[tuple[int, int], _Sum] = field(default_factory=dict[tuple[int, int], _Sum])
    partial: dict[tuple[int, int], tuple[int, BlockAssembly]] = field(
        default_factory=dict[tuple[int, int], tuple[int, BlockAssembly]]
    )
    """With the step of each."""


class Carrier:
    """What the workers of a host have handed over; links have any numbers of the caller's."""

    def __init__(self, session: Session, layout: GradientLayout) -> None:
        self._session = session
        self._layout = layout
        self._own = _Peer(session.rank, session.generation)
        self._peers: dict[int, _Peer] = {}
        self._task: ShardAssignment | None = None
        """What it adds up in the present step."""
        self._sent: set[int] = set()
        self._next_step = 0
        """Gradients of an earlier step are of no use any more."""

    def receive(self, link: int, frame: Frame) -> tuple[list[Frame], Iterator[Frame]]:
        """Take a frame in; return an answer, and frames for the coordinator.

        Raises:
            ProtocolError: it is not what a worker hands over.
        """
        peer = self._peers.get(link)
        if peer is None:
            return [self._introduced(link, frame)], iter(())
        if frame.type not in _GRADIENTS or frame.block >= len(self._layout.blocks):
            raise ProtocolError(f"{frame.type.name} of block {frame.block} is not for a carrier")
        if (frame.rank, frame.generation) != (peer.rank, peer.generation):
            raise ProtocolError(f"a gradient of another worker than rank {peer.rank}")
        if frame.codec != _EXACT.id:
            raise ProtocolError(f"codec {frame.codec} came, a carrier takes {_EXACT.name}")
        key = (frame.shard, frame.block)
        if key in peer.sums:
            raise ProtocolError(f"block {frame.block} of shard {frame.shard} is here already")
        block = self._layout.blocks[frame.block]
        if frame.step < self._next_step:
            return [], iter(())
        if key not in peer.partial:
            assembly = BlockAssembly(_EXACT, block.size, frame.weight)
            peer.partial[key] = frame.step, assembly
        step, assembly = peer.partial[key]
        if not assembly.add(frame):
            return [], iter(())
        del peer.partial[key]
        peer.sums[key] = _Sum(step, assembly.bytes.view("<f4"), assembly.weight)
        return [], self._merged(block)

    def gone(self, link: int) -> None:
        """Forget what came over a link that is closed."""
        self._peers.pop(link, None)

    def follow(self, event: Event) -> Iterator[Frame]:
        """Look at what the coordinator said; return what can be sent of a new step already."""
        if isinstance(event, Committed):
            self._forget(event.commit.step)
        elif isinstance(event, ShardAssignment) and event.carries:
            self._task = event
            self._sent.clear()
            return chain.from_iterable([self._merged(block) for block in self._layout.blocks])
        return iter(())

    def add(
        self, task: ShardAssignment, index: int, gradient: Float32, weight: int
    ) -> Iterator[Frame]:
        """Take in a block of this worker's own; the array must not change after the call."""
        if task != self._task:
            return iter(())
        self._own.sums[task.shard, index] = _Sum(task.step, gradient, weight)
        return self._merged(self._layout.blocks[index])

    def _forget(self, step: int) -> None:
        """Forget everything of a step that is over."""
        self._next_step = step + 1
        self._task = None
        for peer in (self._own, *self._peers.values()):
            peer.sums = {key: part for key, part in peer.sums.items() if part.step > step}
            peer.partial = {key: part for key, part in peer.partial.items() if part[0] > step}

    def _introduced(self, link: int, frame: Frame) -> Frame:
        request = messages.parse(frame)
        if not isinstance(request, messages.CarryRequest):
            raise ProtocolError(f"{frame.type.name} before CarryRequest")
        for other in [number for number, peer in self._peers.items() if peer.rank == request.rank]:
            del self._peers[other]  # the same worker has come back: its older link is void
        self._peers[link] = _Peer(request.rank, request.generation)
        session = self._session
        accepted = messages.CarryAccepted(rank=session.rank, generation=session.generation)
        return session.message(accepted)

    def _merged(self, block: Block) -> Iterator[Frame]:
        """Return the frames of a block's sum and of what went in, once all parts are here."""
        task = self._task
        if task is None or block.index in self._sent:
            return iter(())
        peers = {peer.rank: peer for peer in (*self._peers.values(), self._own)}
        found: list[_Sum] = []
        for rank, shard in task.carries:
            part = peers[rank].sums.get((shard, block.index)) if rank in peers else None
            if part is None or part.step != task.step:
                return iter(())
            found.append(part)
        self._sent.add(block.index)
        parts = tuple(_describe(block, part) for part in found)
        total = found[0].values
        with np.errstate(over="ignore", invalid="ignore"):  # the coordinator names what is wrong
            for other in found[1:]:
                total = total + other.values
        weight = sum(part.weight for part in found)
        told = BlockParts(shard=task.shard, block=block.index, parts=parts)
        gradient = self._session.block(task, block.index, total, weight)
        return chain([self._session.message(told, task.step)], gradient)


def _describe(block: Block, part: _Sum) -> Part:
    """Return what the coordinator checks of one part."""
    tensors = [
        part.values[slot.start - block.start : slot.stop - block.start] for slot in block.tensors
    ]
    with np.errstate(over="ignore", invalid="ignore"):
        squares = [float(np.dot(values, values)) for values in tensors]
    if not math.isfinite(sum(squares)):
        for index, values in enumerate(tensors):
            if not np.isfinite(values).all():
                return Part(weight=part.weight, norm=None, tensor=index)
        squares = [float(np.sum(np.square(values, dtype=np.float64))) for values in tensors]
    largest = max(range(len(squares)), key=squares.__getitem__)
    return Part(weight=part.weight, norm=math.sqrt(sum(squares)), tensor=largest)
