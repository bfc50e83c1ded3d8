"""The ReadingReporter: reports to the coordinator that a worker reads its data before it joins.

It keeps a connection to the coordinator, which judges what is reported there.
"""

from __future__ import annotations

import asyncio
import logging
import random
import ssl
from pathlib import Path

from trainer.exchange.protocol.members import RefusalError
from trainer.exchange.protocol.messages import (
    JoinRefused,
    Shutdown,
    parse_message,
)
from trainer.exchange.protocol.wire import Frame, IncompatibleError, run_tag
from trainer.exchange.transport import tls
from trainer.exchange.transport.link import Link
from trainer.exchange.transport.reading_thread import INTERVAL, MAX_QUEUED, ReadingThread
from trainer.exchange.transport.sockets import HANDSHAKE, connect_host, shake_hands
from trainer.system.errors import ProtocolError
from trainer.system.process.native_thread import exit_from_any_thread

log = logging.getLogger(__name__)

_CONNECT = 5.0
"""Seconds that one attempt to connect may take."""


class ReadingReporter(ReadingThread):
    """Reports what this process reads, until the block ends.

    If the run ends meanwhile, so does the process: its main thread may hang in the reading.

    Args:
        rank: as in the request to join.
        folder: of this worker's certificate; None for plaintext on loopback.
    """

    _longest_end = INTERVAL  # an attempt to connect may last longer, and ends by itself

    def __init__(
        self, address: tuple[str, int], run_id: str, rank: int | None, folder: Path | None
    ) -> None:
        super().__init__("reading-reporter", rank)
        self._address, self._run_id = address, run_id
        self._context = tls.make_context(folder, server=False) if folder else None
        self._closed = asyncio.Event()
        self._refused = False
        """Whether further attempts cannot succeed."""

    async def _report_until_read(self) -> None:
        """Keep a connection while the data is read; why there is none, the worker says later."""
        while not (self._over.is_set() or self._refused):
            try:
                await self._report_on_one_link()
            except (OSError, TimeoutError) as error:
                self._on_lost(error)
            await self._wait_until_read(INTERVAL * random.uniform(0.5, 1.5))  # noqa: S311 - no secret

    async def _report_on_one_link(self) -> None:
        self._closed.clear()
        link = Link(
            run_tag(self._run_id),
            opened=self._on_opened,
            frame=self._on_frame,
            on_bytes=lambda _: None,
            closed=lambda link, reason: self._on_lost(link.error or reason),
            max_queued=MAX_QUEUED,
        )
        async with asyncio.timeout(_CONNECT + HANDSHAKE):
            connection = await connect_host(*self._address)
            link.serve_connection(await shake_hands(connection, self._context, server=False))
        while not (self._over.is_set() or self._closed.is_set()):
            link.send([self._make_report()])
            await self._wait_until_read(INTERVAL)
            link.poll()
        link.abort("the data is read")
        await self._closed.wait()

    def _on_opened(self, link: Link) -> None:
        try:
            if certificates := link.certificates:
                tls.check_coordinator(certificates, self._run_id)
        except RefusalError as refusal:
            link.abort(str(refusal))

    def _on_frame(self, link: Link, frame: Frame) -> None:
        try:
            message = parse_message(frame)
        except ProtocolError as error:
            link.abort(str(error))
            return
        if isinstance(message, Shutdown):
            log.error(
                "the coordinator ends this worker while it reads its data: %s", message.reason
            )
            exit_from_any_thread(message.exit_code)
        if isinstance(message, JoinRefused):
            self._refused = not message.retry

    def _on_lost(self, reason: str | Exception) -> None:
        log.debug("%s:%d: %s", *self._address, reason)
        if isinstance(reason, ssl.SSLError) and not isinstance(reason, tls.TRANSIENT):
            self._refused = True
        if isinstance(reason, IncompatibleError):
            self._refused = True
        self._closed.set()
