"""The WorkerClient: a worker's connection to the coordinator, in a thread of its own.

The thread sends and receives while the worker's main thread computes, and comes back with
jittered backoff when the connection is lost.
"""

from __future__ import annotations

import asyncio
import logging
import math
import queue
import random
import ssl
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trainer.exchange.policies.feedback import make_sender_codec
from trainer.exchange.protocol import messages
from trainer.exchange.protocol.members import RefusalError
from trainer.exchange.protocol.messages import JoinRequest, Message, ShardAssignment, Shutdown
from trainer.exchange.protocol.wire import Frame, IncompatibleError, run_tag
from trainer.exchange.transport import same_host, tls
from trainer.exchange.transport.event_loop import call_in_loop
from trainer.exchange.transport.link import FLUSH, Link
from trainer.exchange.transport.sockets import HANDSHAKE, connect_host, shake_hands
from trainer.exchange.worker.session import Event, Session
from trainer.model.layout import GradientLayout
from trainer.system.errors import RefusedError, TrainerError, UnreachableError
from trainer.system.process.priority import raise_thread_priority
from trainer.system.storage.progress import LOG_INTERVAL

log = logging.getLogger(__name__)

CONNECT = 5.0
"""Seconds that one attempt to connect may take."""
_FIRST_BACKOFF, _MAX_BACKOFF = 0.1, 3.0
_WAIT = 1.0
"""Seconds of one wait of the main thread: a signal in the moment before shows at its end only."""
_LOOK = 0.1


class WorkerClient:
    """The Exchange of `--role worker`."""

    def __init__(
        self,
        address: tuple[str, int],
        request: JoinRequest,
        layout: GradientLayout,
        *,
        codec: str,
        folder: Path | None,
        patience: float,
        rounds: bool = False,
    ) -> None:
        """Connect to `address`; give up after `patience` seconds without the coordinator.

        For `rounds` see `Session`.
        """
        host, _ = address
        if folder is None and not tls.is_loopback(host):
            raise RefusedError(
                f"--coordinator {host}: gradients do not leave this machine without TLS; give "
                "--tls DIR with this worker's certificate"
            )
        self._address = address
        self._request = request
        self._layout = layout
        self._codec = codec
        self._rounds = rounds
        self._tag = run_tag(request.run_id)
        self._sizes = make_sender_codec(codec, layout, rounds=rounds).compute_largest_sizes()
        self._context = tls.make_context(folder, server=False) if folder else None
        self._patience = patience
        self._events: queue.SimpleQueue[tuple[Session | None, Event | Exception | None]]
        self._events = queue.SimpleQueue()
        self._session: Session | None = None
        self._served: Session | None = None
        """The membership that the loop's last event was of; its answers belong there."""
        self._link: Link | None = None
        self._lost: asyncio.Future[str] | None = None
        self._last_activity = time.monotonic()
        self._reading_logged = -math.inf
        """When the log last had what the coordinator reads."""
        self._over = False
        self._main_waits = False
        """Whether the main thread waits for an event."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name="exchange", daemon=True)
        self._thread.start()

    # The loop's side

    def next_event(self) -> Event | None:
        """Wait for the next event of the present membership."""
        self._main_waits = True
        try:
            return self._take_event()
        finally:
            self._main_waits = False

    def _take_event(self) -> Event | None:
        while True:
            try:
                session, event = self._events.get(timeout=_WAIT)
            except queue.Empty:
                continue
            if isinstance(event, Exception):
                raise event
            if session is None:
                return event
            if session is self._session or isinstance(event, Shutdown):
                self._served = session
                return event

    def send_block(
        self, shard: ShardAssignment, index: int, gradient: NDArray[np.float32], weight: int
    ) -> None:
        """Queue a block's gradient sum; dropped when the membership it belongs to is gone.

        A quantised one is encoded by the thread, when the link has room for it.
        """
        if session := self._current_session():
            self._post_frames(session, session.make_block_frames(shard, index, gradient, weight))

    def send(self, message: Message, step: int) -> None:
        """Queue a result or a report."""
        if session := self._current_session():
            self._post_frames(session, session.make_answer_frames(message, step))

    def interrupt(self, reason: str) -> None:
        """Wake the loop."""
        del reason
        self._events.put((None, None))

    def close(self, reason: str) -> None:
        """Say goodbye, send what is queued, and end the thread."""
        self.send(messages.Leave(reason=reason), 0)
        call_in_loop(self._loop, self._close_link, reason)
        self._thread.join(timeout=2 * FLUSH)

    def _current_session(self) -> Session | None:
        """Return the membership that the loop works for, unless it is gone."""
        return self._served if self._served is self._session else None

    def _post_frames(self, session: Session, frames: Iterable[Frame]) -> None:
        call_in_loop(self._loop, self._send_frames, session, frames)

    # The thread's side

    def _run_loop(self) -> None:
        try:
            with raise_thread_priority():
                self._loop.run_until_complete(self._stay_connected())
        except Exception as error:  # a defect: the loop must not wait for what never comes
            self._report_error(error)
        finally:
            self._loop.close()

    async def _stay_connected(self) -> None:
        backoff = _FIRST_BACKOFF
        reason = "no attempt was made"
        while not self._over:
            refused = False
            try:
                reason = await self._serve_link()
                refused = bool(self._session and self._session.reading)
                if refused or (self._session and self._session.accepted):
                    backoff = _FIRST_BACKOFF
            except RefusalError as refusal:
                reason, refused = str(refusal), True
                if not refusal.retry:
                    self._report_error(refusal)
                    return
            except RefusedError as error:
                self._report_error(error)
                return
            except (OSError, TimeoutError) as error:
                reason = str(error) or type(error).__name__
                if isinstance(error, ssl.SSLError) and not isinstance(error, tls.TRANSIENT):
                    self._report_error(RefusedError(f"{self._address_text}: TLS failed: {reason}"))
                    return
            finally:
                was_member = self._session is not None and self._session.accepted is not None
                self._session = self._link = None
            if was_member:
                await self._wait_for_main_thread()
            if self._over:
                return
            if self._is_overdue():
                missing = "not admitted" if refused else "no coordinator"
                what = f"{missing} for {self._patience:.0f} s ({reason})"
                self._report_error(UnreachableError(f"{self._address_text}: {what}"))
                return
            # Jitter keeps workers that were cut off together from returning together.
            await asyncio.sleep(backoff * random.uniform(0.5, 1.5))  # noqa: S311 - no secret
            backoff = min(2 * backoff, _MAX_BACKOFF)

    async def _wait_for_main_thread(self) -> None:
        """Wait until it asks for an event: while it hangs, each return would cost a deadline."""
        while not (self._main_waits or self._over):
            await asyncio.sleep(_LOOK)
            self._last_activity = time.monotonic()

    async def _serve_link(self) -> str:
        """Be a member for as long as it lasts and return why it ended."""
        host, port = self._address
        self._lost = asyncio.get_running_loop().create_future()
        link = Link(
            self._tag,
            opened=self._on_opened,
            frame=self._on_frame,
            on_bytes=self._on_bytes,
            closed=self._on_closed,
            max_queued=1_000_000,
        )
        if here := await same_host.connect_same_host(self._address, self._tag, self._sizes):
            link.serve_connection(*here)
        else:
            async with asyncio.timeout(CONNECT + HANDSHAKE):
                connection = await connect_host(host, port)
                link.serve_connection(await shake_hands(connection, self._context, server=False))
        self._last_received = time.monotonic()
        while not self._lost.done():
            assert self._session is not None  # else `_opened` has ended the connection
            accepted = self._session.accepted
            # Not yet in: look often, for the first beat is due soon after being let in.
            interval = accepted.heartbeat if accepted else _LOOK
            # Twice the coordinator's own limit: it, not the worker, decides which end is lost.
            limit = 2 * accepted.lost_after if accepted else CONNECT + HANDSHAKE
            await asyncio.wait([self._lost], timeout=interval)
            if self._link:
                self._link.poll()
            if self._link and time.monotonic() - self._last_received > limit:
                self._link.abort(f"the coordinator was silent for {limit:g} s")
            elif self._link and (reading := self._session.reading) and self._is_overdue():
                self._link.abort(reading.describe_stop("the coordinator"))
            elif accepted and self._link and self._link.is_idle:
                self._send_frames(self._session, [self._session.make_frame(messages.Heartbeat())])
        return await self._lost

    def _on_opened(self, link: Link) -> None:
        self._link = link
        try:
            if certificates := link.certificates:
                tls.check_coordinator(certificates, self._request.run_id)
        except RefusalError as refusal:
            self._end_link(refusal)
            return
        link.accept_tensors()
        request = self._request.model_copy(update={"transport": link.transport})
        self._session = Session(request, self._layout, self._codec, self._rounds)
        link.send([self._session.make_join_frame()])

    def _on_bytes(self, link: Link) -> None:
        """Note that bytes pass: on a slow line one frame can take longer than silence may last."""
        del link
        self._last_received = time.monotonic()

    def _on_frame(self, link: Link, frame: Frame) -> None:
        assert self._session is not None
        before = self._session.reading
        try:
            events, answers = self._session.receive_frame(frame)
        except RefusalError as refusal:
            reason = f"the coordinator refused this worker: {refusal}"
            self._end_link(RefusalError(reason, refusal.retry))
            return
        reading = self._session.reading
        now = time.monotonic()
        if reading and now - self._reading_logged >= LOG_INTERVAL:
            self._reading_logged = now
            log.info("waiting for the coordinator on %s: %s", reading.host, reading.description)
        if not reading or (before and reading.count > before.count):
            # A first report proves nothing: one that hangs may be reached again and again.
            self._last_activity = now
        if answers:
            link.send(answers)
        for event in events:
            if isinstance(event, Shutdown):
                self._over = True
                link.abort(event.reason)
            self._events.put((self._session, event))

    def _on_closed(self, link: Link, reason: str) -> None:
        if self._lost is None or self._lost.done():
            return
        introduced = self._session is not None and self._session.accepted is not None
        if isinstance(link.error, ssl.SSLError) and not introduced:
            # In TLS 1.3 the refusal of our certificate comes after our handshake succeeded.
            self._lost.set_exception(link.error)
        elif isinstance(link.error, IncompatibleError) and not introduced:
            self._lost.set_exception(RefusedError(f"{self._address_text}: {link.error}"))
        else:
            self._lost.set_result(reason)

    def _end_link(self, error: TrainerError) -> None:
        assert self._link is not None
        assert self._lost is not None
        if not self._lost.done():
            self._lost.set_exception(error)
        self._link.abort(str(error))

    def _send_frames(self, session: Session, frames: Iterable[Frame]) -> None:
        if self._link and session is self._session:
            self._link.send(frames)

    def _close_link(self, reason: str) -> None:
        self._over = True
        if self._link:
            self._link.close(reason)

    def _is_overdue(self) -> bool:
        return time.monotonic() - self._last_activity > self._patience

    def _report_error(self, error: Exception) -> None:
        self._over = True
        self._events.put((None, error))

    @property
    def _address_text(self) -> str:
        return f"{self._address[0]}:{self._address[1]}"
