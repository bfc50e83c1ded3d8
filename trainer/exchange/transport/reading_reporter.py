"""The ReadingReporter: reports to the coordinator that a worker reads its data before it joins.

The worker's main thread reads. A thread of its own keeps a connection to the coordinator and
reports on it how much has been read, whether that has grown or not: the coordinator judges that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import socket
import ssl
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

from trainer.exchange.protocol.members import RefusalError
from trainer.exchange.protocol.messages import (
    Heartbeat,
    JoinRefused,
    Reading,
    Shutdown,
    parse_message,
)
from trainer.exchange.protocol.wire import Frame, IncompatibleError, run_tag
from trainer.exchange.transport import tls
from trainer.exchange.transport.event_loop import call_in_loop
from trainer.exchange.transport.link import Link
from trainer.exchange.transport.sockets import HANDSHAKE, connect_host, shake_hands
from trainer.system.errors import ProtocolError
from trainer.system.process.native_thread import exit_from_any_thread
from trainer.system.storage.progress import latest_progress

log = logging.getLogger(__name__)

_INTERVAL = 0.5
"""Seconds between two reports, and on average between two attempts to connect."""
_CONNECT = 5.0
"""Seconds that one attempt to connect may take."""
_MOST_QUEUED = 100
"""Reports that a coordinator may leave unread."""


class ReadingReporter:
    """Reports what this process reads, until the block ends.

    If the run ends meanwhile, so does the process: its main thread may hang in the reading.

    Args:
        rank: as in the request to join.
        folder: of this worker's certificate; None for plaintext on loopback.
    """

    def __init__(
        self, address: tuple[str, int], run_id: str, rank: int | None, folder: Path | None
    ) -> None:
        self._address, self._run_id, self._rank = address, run_id, rank
        self._context = tls.make_context(folder, server=False) if folder else None
        self._host = " ".join(socket.gethostname().split())
        self._loop = asyncio.new_event_loop()
        self._over = asyncio.Event()
        self._closed = asyncio.Event()
        self._refused = False
        """Whether further attempts cannot succeed."""
        self._thread = threading.Thread(target=self._run_loop, name="reading-reporter", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        call_in_loop(self._loop, self._over.set)
        self._thread.join(_INTERVAL)  # an attempt to connect may last longer, and ends by itself

    def _run_loop(self) -> None:
        try:
            self._loop.run_until_complete(self._report_until_read())
        except Exception:  # the worker joins without it, if the coordinator waits long enough
            log.warning("no longer reports what it reads", exc_info=True)
        finally:
            self._loop.close()

    async def _report_until_read(self) -> None:
        """Keep a connection while the data is read; why there is none, the worker says later."""
        while not (self._over.is_set() or self._refused):
            try:
                await self._report_on_one_link()
            except (OSError, TimeoutError) as error:
                self._on_lost(error)
            await self._wait_until_read(_INTERVAL * random.uniform(0.5, 1.5))  # noqa: S311 - no secret

    async def _report_on_one_link(self) -> None:
        self._closed.clear()
        link = Link(
            run_tag(self._run_id),
            opened=self._on_opened,
            frame=self._on_frame,
            heard=lambda _: None,
            closed=lambda link, reason: self._on_lost(link.error or reason),
            max_queued=_MOST_QUEUED,
        )
        async with asyncio.timeout(_CONNECT + HANDSHAKE):
            connection = await connect_host(*self._address)
            link.serve_connection(await shake_hands(connection, self._context, server=False))
        while not (self._over.is_set() or self._closed.is_set()):
            count, line = latest_progress()
            reading = Reading(rank=self._rank, host=self._host, count=count, line=line[:300])
            link.send([Heartbeat(reading=reading).to_frame(0)])
            await self._wait_until_read(_INTERVAL)
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
            self._refused = True

    def _on_lost(self, reason: str | Exception) -> None:
        log.debug("%s:%d: %s", *self._address, reason)
        if isinstance(reason, ssl.SSLError) and not isinstance(reason, tls.TRANSIENT):
            self._refused = True
        if isinstance(reason, IncompatibleError):
            self._refused = True
        self._closed.set()

    async def _wait_until_read(self, seconds: float) -> None:
        """Wait, or until the data is read."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._over.wait(), seconds)
