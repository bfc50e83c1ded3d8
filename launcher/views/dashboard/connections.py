"""The dashboard's connections: how many there are, and how long each may take.

uvicorn has no time for a request's headers, and its limit of connections refuses new ones, so that
idle ones keep all others out. Here the oldest one gives way: a page that is closed so connects
again by itself.
"""

from __future__ import annotations

import asyncio
import resource
from typing import Any

from uvicorn import Config, Server
from uvicorn.protocols.http.h11_impl import H11Protocol

MOST = 128
"""Connections at once; a page has one or two."""
PATIENCE = 10.0
"""Seconds for a TLS handshake, for a request's headers, and between two requests."""
STALL = 30.0
"""Seconds in which a reader takes nothing of what is sent."""
_DESCRIPTORS = 4096
"""Open files that the process may have: connections whose handshake is under way count too."""


class BoundedProtocol(H11Protocol):
    """uvicorn's connection, which ends when it is idle, stalled, or one of too many."""

    _deadline: asyncio.TimerHandle | None = None
    _stall: asyncio.TimerHandle | None = None

    @property
    def _is_idle(self) -> bool:
        cycle: Any = self.cycle  # None before the first request
        return cycle is None or cycle.response_complete

    def connection_made(self, transport: Any) -> None:
        """Begin a connection; of too many the oldest idle one ends, else the oldest one."""
        super().connection_made(transport)
        # A dict keeps the order; uvicorn's own set does not.
        order: dict[BoundedProtocol, None] = self.app_state.setdefault("connections", {})
        if len(order) >= MOST:
            oldest = next((one for one in order if one._is_idle), next(iter(order)))
            oldest._abort_connection()
        order[self] = None
        self._wait_for_request()

    def connection_lost(self, exc: Exception | None) -> None:
        """End a connection."""
        self.app_state["connections"].pop(self, None)
        self._remove_connection()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read a request; bytes that do not complete its headers do not extend their time."""
        before = self.cycle
        super().data_received(data)
        if self.cycle is not before and not self._is_idle:
            self._cancel_deadline()

    def on_response_complete(self) -> None:
        """Wait for the next request, whatever is still to come of this one's body."""
        self._wait_for_request()
        super().on_response_complete()
        if not self._is_idle:  # the next one was there already
            self._cancel_deadline()

    def pause_writing(self) -> None:
        """Give a reader that has stopped some time."""
        super().pause_writing()
        if self._stall is None:
            self._stall = self.loop.call_later(STALL, self._abort_connection)

    def resume_writing(self) -> None:
        """Go on with a reader that reads again."""
        super().resume_writing()
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def shutdown(self) -> None:
        """End at once: a reader that has stopped would keep a closing connection open."""
        self._abort_connection()

    def _wait_for_request(self) -> None:
        self._cancel_deadline()
        self._deadline = self.loop.call_later(PATIENCE, self._abort_connection)

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _remove_connection(self) -> None:
        self._cancel_deadline()
        if self._stall is not None:
            self._stall.cancel()

    def _abort_connection(self) -> None:
        self.app_state["connections"].pop(self, None)
        self._remove_connection()
        self.transport.abort()


class _Loop(asyncio.SelectorEventLoop):
    """An event loop whose servers do not wait long for a TLS handshake."""

    async def create_server(self, *args: Any, **settings: Any) -> Any:
        """Return a server, as the base class does."""
        if settings.get("ssl") is not None:
            settings["ssl_handshake_timeout"] = PATIENCE
        return await super().create_server(*args, **settings)


def run_server(config: Config, listening: Any) -> None:
    """Serve on a socket until a signal ends it; `config.http` is `BoundedProtocol`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or hard > soft:
        most = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
    with asyncio.Runner(loop_factory=_Loop) as runner:
        runner.run(Server(config).serve(sockets=[listening]))
