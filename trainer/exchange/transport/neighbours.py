"""The workers of one host: the first to take the name carries the gradients of the others.

The kernel elects: only one process can listen at a name, and the name is free again when that
process ends, for whatever reason. Everything here runs in the thread of the worker's connection,
and lasts no longer than its membership.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from trainer.exchange.protocol import messages
from trainer.exchange.protocol.compression.choice import AgreedCodec
from trainer.exchange.protocol.messages import CarriedBy, CarryRequest, ShardAssignment
from trainer.exchange.protocol.wire import Frame
from trainer.exchange.transport.link import Link
from trainer.exchange.transport.same_host import SameHostListener, connect_to
from trainer.exchange.transport.shared_memory import WorkerEnd
from trainer.exchange.worker.carrier import Carrier
from trainer.exchange.worker.session import Committed, Event, Session
from trainer.model.layout import GradientLayout
from trainer.system.errors import ProtocolError

_AGAIN = 1.0
"""Seconds, on average, until a worker looks again for a carrier, or becomes it."""
_MAX_QUEUED = 1_000_000


class Neighbours:
    """A worker's relation to the others of its host, membership by membership."""

    def __init__(
        self,
        name: bytes,
        run: int,
        layout: GradientLayout,
        send: Callable[[Session, Iterable[Frame]], None],
        fail: Callable[[Exception], None],
    ) -> None:
        """Meet at `name`; `send` takes frames for the coordinator, `fail` is told of a defect."""
        self._name = name
        self._run = run
        self._layout = layout
        self._send = send
        self._fail = fail
        self._sizes = AgreedCodec("fp32", layout).largest()
        self._session: Session | None = None
        self._meeting: asyncio.Task[None] | None = None
        self._listener: SameHostListener | None = None
        self._carrier: Carrier | None = None
        self._carried: dict[Link, int] = {}
        self._count = 0
        self._link: Link | None = None
        """To the carrier, when that is another worker."""
        self._end: WorkerEnd | None = None
        self._carrier_rank: int | None = None

    def join(self, session: Session) -> None:
        """Look for the others; the membership has begun."""
        self._session = session
        self._meeting = asyncio.get_running_loop().create_task(self._meet(session))
        self._meeting.add_done_callback(self._met)

    async def leave(self) -> None:
        """Let go of all links: the membership is over."""
        self._session = self._carrier = None
        if self._listener:
            self._listener.close()
            self._listener = None
        for link in list(self._carried):
            link.abort("its carrier has left the run")
        meeting, self._meeting = self._meeting, None
        if meeting:
            meeting.cancel()
            await asyncio.wait([meeting])

    def follow(self, event: Event) -> None:
        """Look at what the coordinator said before the worker's loop does."""
        if self._session is None:
            return
        if self._carrier:
            self._send(self._session, self._carrier.follow(event))
        if self._end and isinstance(event, Committed):
            # No frame that is read late can count: the step is committed without it.
            self._end.release()

    def add(
        self,
        session: Session,
        shard: ShardAssignment,
        index: int,
        gradient: NDArray[np.float32],
        weight: int,
    ) -> None:
        """Add a block of this worker's own to what it carries; the array must not change."""
        if self._carrier and session is self._session:
            self._send(session, self._carrier.add(shard, index, gradient, weight))

    def hand_over(self, session: Session, carrier: int, frames: Iterable[Frame]) -> None:
        """Send a block to the carrier; if that is gone, the coordinator knows or will."""
        if self._link and session is self._session and carrier == self._carrier_rank:
            self._link.send(frames)

    # Inside

    async def _meet(self, session: Session) -> None:
        while True:
            try:
                listener = SameHostListener(self._name, self._sizes, self._make_link)
            except OSError:  # another worker has the name
                await self._be_carried(session)
                await asyncio.sleep(_AGAIN * random.uniform(0.5, 1.5))  # noqa: S311 - no secret
            else:
                self._carrier = Carrier(session, self._layout)
                self._listener = listener
                listener.start()
                return

    async def _be_carried(self, session: Session) -> None:
        """Hand gradients to the carrier for as long as the link to it lasts."""
        found = await connect_to(self._name, self._sizes)
        if found is None:
            return
        connection, end = found
        ended = asyncio.Event()
        link = Link(
            self._run,
            opened=_nothing,
            frame=self._accepted,
            heard=_nothing,
            closed=lambda _link, _reason: ended.set(),
            max_queued=_MAX_QUEUED,
        )
        self._link, self._end = link, end
        try:
            link.begin(connection, end)
            request = CarryRequest(rank=session.rank, generation=session.generation)
            link.send([session.message(request)])
            await ended.wait()
        finally:
            link.abort("it has left the run")
            self._link = self._end = None
            if self._carrier_rank is not None:
                self._carrier_rank = None
                self._send(session, [session.message(CarriedBy(rank=None))])

    def _accepted(self, link: Link, frame: Frame) -> None:
        accepted = messages.parse(frame)
        if not isinstance(accepted, messages.CarryAccepted):
            raise ProtocolError(f"{frame.type.name} is not for a worker that is carried")
        if link is self._link and self._session:
            self._carrier_rank = accepted.rank
            told = CarriedBy(rank=accepted.rank, generation=accepted.generation)
            self._send(self._session, [self._session.message(told)])

    def _met(self, meeting: asyncio.Task[None]) -> None:
        if not meeting.cancelled() and (error := meeting.exception()):
            assert isinstance(error, Exception)
            self._fail(error)

    # The carrier's ends

    def _make_link(self) -> Link:
        return Link(
            self._run,
            opened=self._opened,
            frame=self._frame,
            heard=_nothing,
            closed=self._closed,
            max_queued=_MAX_QUEUED,
        )

    def _opened(self, link: Link) -> None:
        self._count += 1
        self._carried[link] = self._count

    def _frame(self, link: Link, frame: Frame) -> None:
        if self._carrier is None or self._session is None:
            return
        answers, upwards = self._carrier.receive(self._carried[link], frame)
        if answers:
            link.admit()
            link.send(answers)
        self._send(self._session, upwards)

    def _closed(self, link: Link, reason: str) -> None:
        del reason
        number = self._carried.pop(link, None)
        if self._carrier and number is not None:
            self._carrier.gone(number)


def _nothing(link: Link) -> None:
    del link
