"""The ReadingListener: reports what the coordinator reads to workers that are ready before it.

A worker that asks to join, or reports what it reads itself, is answered with reports; when the data
is read its connection is closed, and it comes back to the server at the same address.
"""

from __future__ import annotations

import asyncio
import logging
import time

from trainer.exchange.coordinator.pending_connections import JOIN_REQUEST_TIMEOUT
from trainer.exchange.protocol.members import RefusalError
from trainer.exchange.protocol.messages import JoinRefused
from trainer.exchange.protocol.wire import Frame, MessageType, run_tag
from trainer.exchange.transport import tls
from trainer.exchange.transport.link import FLUSH, Link
from trainer.exchange.transport.listener import BoundAddress, Listener
from trainer.exchange.transport.reading_thread import INTERVAL, MAX_QUEUED, ReadingThread
from trainer.exchange.transport.refusals import RefusalReporter
from trainer.system.errors import ProtocolError

log = logging.getLogger(__name__)


class ReadingListener(ReadingThread):
    """Reports what the coordinator reads at an address that it serves later, until the block ends.

    Nothing is sent to a peer before its certificate, if there are any, and its run are known.
    """

    def __init__(self, bound: BoundAddress, run_id: str) -> None:
        super().__init__("reading-listener", rank=None)
        self._run_id = run_id
        self._listener = Listener(
            bound.bind_again(),
            self._make_link,
            RefusalReporter(lambda event: log.warning("refused: %s", event["reason"])),
        )
        self._silent: dict[Link, float] = {}
        """Times of arrival of the connections that have sent nothing."""
        self._waiting: set[Link] = set()

    async def _report_until_read(self) -> None:
        try:
            self._listener.start()
            while not self._over.is_set():
                for link in list(self._waiting):
                    link.send([self._make_report()])
                for link, since in list(self._silent.items()):
                    if time.monotonic() - since > JOIN_REQUEST_TIMEOUT:
                        link.abort("no JoinRequest")
                await self._wait_until_read(INTERVAL)
        finally:
            self._listener.close()
            await self._end_links()

    async def _end_links(self) -> None:
        deadline = time.monotonic() + FLUSH
        while (links := {*self._silent, *self._waiting}) and time.monotonic() < deadline:
            for link in links:
                link.abort("the data is read")
            await asyncio.sleep(0)

    def _make_link(self) -> Link:
        return Link(
            run_tag(self._run_id),
            opened=self._on_opened,
            frame=self._on_frame,
            on_bytes=lambda _: None,
            closed=self._on_closed,
            max_queued=MAX_QUEUED,
            incompatible=lambda link, reason: _refuse(link, RefusalError(reason)),
        )

    def _on_opened(self, link: Link) -> None:
        self._silent[link] = time.monotonic()
        try:
            if chain := link.certificates:
                tls.read_certified_rank(chain, self._run_id)
                self._listener.admit_link(link)
        except RefusalError as refusal:
            _refuse(link, refusal)
        except ProtocolError as error:
            log.warning("refused: %s: %s", link.peer, error)
            link.abort(str(error))

    def _on_frame(self, link: Link, frame: Frame) -> None:
        if frame.type not in (MessageType.JOIN_REQUEST, MessageType.HEARTBEAT):
            link.abort(f"{frame.type.name} before JoinRequest")
        elif self._silent.pop(link, None):
            self._waiting.add(link)
            link.send([self._make_report()])

    def _on_closed(self, link: Link, reason: str) -> None:
        log.debug("%s: %s", link.peer, reason)
        self._listener.forget_link(link)
        self._silent.pop(link, None)
        self._waiting.discard(link)


def _refuse(link: Link, refusal: RefusalError) -> None:
    link.send([JoinRefused(reason=str(refusal)[:1000], retry=refusal.retry).to_frame(0)])
