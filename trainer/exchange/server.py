"""The GradientServer: sockets and TLS around the coordinator's state machine."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from pathlib import Path

from trainer.errors import InputError, ProtocolError
from trainer.exchange import tls
from trainer.exchange.actions import Action, Close, Emit, Finish, Save, Send, Settle
from trainer.exchange.coordinator import Coordinator
from trainer.exchange.heap import return_freed_arrays
from trainer.exchange.keeper import Keeper
from trainer.exchange.link import FLUSH, HANDSHAKE, Link
from trainer.exchange.messages import JoinRefused
from trainer.exchange.wire import Frame, run_tag

MAX_LINKS = 256
"""Connections at a time, members and strangers together."""
_STEPS_BEHIND = 8


class GradientServer:
    """Runs one coordinator on one address until its run is over."""

    def __init__(
        self, coordinator: Coordinator, keeper: Keeper, bind: tuple[str, int], folder: Path | None
    ) -> None:
        host, _ = bind
        if folder is None and not tls.is_loopback(host):
            raise InputError(
                f"--bind {host}: other machines can reach this address, so TLS is needed; give "
                "--tls DIR, or let `launch cluster up` start the run"
            )
        self._coordinator = coordinator
        self._keeper = keeper
        self._bind = bind
        self._context = tls.context(folder, server=True) if folder else None
        self._run = run_tag(coordinator.roster.job.run_id)
        blocks = len(coordinator.training.layout.blocks)
        self._max_queued = _STEPS_BEHIND * (blocks + 4)
        self._links: dict[int, Link] = {}
        self._numbers: dict[Link, int] = {}
        self._count = 0
        self._finished: asyncio.Future[Finish] | None = None

    def run(self, on_listening: Callable[[], None] = lambda: None) -> int:
        """Serve until the run is over and return its exit code.

        Raises:
            InputError: the address cannot be bound.
        """
        return_freed_arrays()
        return asyncio.run(self._serve(on_listening))

    @property
    def port(self) -> int:
        """The port in use, also when 0 was asked for; valid while serving."""
        return self._bind[1]

    async def _serve(self, on_listening: Callable[[], None]) -> int:
        loop = asyncio.get_running_loop()
        self._finished = loop.create_future()
        host, port = self._bind
        try:
            server = await loop.create_server(
                self._link,
                host,
                port,
                ssl=self._context,
                ssl_handshake_timeout=HANDSHAKE if self._context else None,
                ssl_shutdown_timeout=FLUSH if self._context else None,
            )
        except OSError as error:
            raise InputError(f"--bind {host}:{port}: {error.strerror or error}") from None
        self._bind = (host, server.sockets[0].getsockname()[1])
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop, f"stopped by {number.name}")
        self._keeper.emit({"event": "listening", "address": f"{host}:{self.port}"})
        on_listening()
        ticker = asyncio.create_task(self._tick())
        try:
            finish = await self._finished
        finally:
            ticker.cancel()
            server.close()
        await self._flush()
        return await asyncio.to_thread(self._keeper.close, finish.exit_code, finish.reason)

    async def _tick(self) -> None:
        interval = self._coordinator.training.config.exchange.heartbeat / 4
        while True:
            await asyncio.sleep(interval)
            self._perform(self._coordinator.tick(time.monotonic()))

    async def _flush(self) -> None:
        """Give the last messages the time to leave."""
        deadline = time.monotonic() + FLUSH
        while self._links and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        for link in list(self._links.values()):
            link.abort("the run is over")

    def _stop(self, reason: str) -> None:
        self._perform(self._coordinator.stop(reason, time.monotonic()))

    def _link(self) -> Link:
        return Link(
            self._run,
            opened=self._opened,
            frame=self._frame,
            closed=self._closed,
            max_queued=self._max_queued,
            incompatible=self._incompatible,
        )

    def _opened(self, link: Link) -> None:
        if len(self._links) >= MAX_LINKS:
            link.abort("too many connections")
            return
        try:
            certificate = link.certificate
            certified = None if certificate is None else tls.certified_rank(certificate)
        except ProtocolError as error:
            self._keeper.emit({"event": "refused", "reason": f"{link.peer}: {error}"})
            link.abort(str(error))
            return
        self._count += 1
        self._links[self._count] = link
        self._numbers[link] = self._count
        self._perform(self._coordinator.connected(self._count, certified, time.monotonic()))

    def _frame(self, link: Link, frame: Frame) -> None:
        number = self._numbers[link]
        self._perform(self._coordinator.receive(number, frame, time.monotonic()))
        if self._coordinator.roster.by_link(number):
            link.admit()

    def _incompatible(self, link: Link, reason: str) -> None:
        """Tell a peer of another version or run: what cannot read the reason sees our header."""
        self._keeper.emit({"event": "refused", "reason": f"{link.peer}: {reason}"})
        link.send([JoinRefused(reason=reason, retry=False).frame(0)])

    def _closed(self, link: Link, reason: str) -> None:
        number = self._numbers.pop(link, None)
        if number is not None:
            del self._links[number]
            self._perform(self._coordinator.disconnected(number, reason, time.monotonic()))

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Send(link=number, frames=frames):
                    if link := self._links.get(number):
                        link.send(frames)
                case Close(link=number, reason=reason):
                    if link := self._links.get(number):
                        link.close(reason)
                case Settle():
                    self._perform(self._coordinator.settle(time.monotonic()))
                case Save():
                    self._keeper.save(action)
                case Emit(event=event):
                    self._keeper.emit(event)
                case Finish():
                    assert self._finished is not None
                    if not self._finished.done():
                        self._finished.set_result(action)
