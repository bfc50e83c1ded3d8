"""Bytes to and from a program on a host: a channel of a login."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque

from launcher.errors import UnreachableError
from launcher.hosts.bootstrap import STARTED
from launcher.hosts.login import Login
from launcher.hosts.ssh_config import SshRoute

LOGIN_DEADLINE = 20.0
"""Seconds until the login shell has started a command."""

_SEND_TIMEOUT = 10.0
_PART = 1 << 16
_LONGEST = 1000
"""Bytes of a line of stderr that are kept in one piece."""


class SshPipe:
    """A `Pipe` (`rpc.py`) to a command that writes `STARTED` to stderr; its login ends with it."""

    def __init__(self, where: str, route: SshRoute, command: str) -> None:
        """Log in.

        Raises:
            UnreachableError, ConfigError: as `Login`, or the login shell does not start.
        """
        self._login = Login(where, route)
        self.run = self._login.run
        self.host_key = self._login.host_key
        """The fingerprint of the key that the host has shown."""
        self._words: deque[str] = deque(maxlen=64)
        self._rest = b""
        self._draining = threading.Lock()
        try:
            self._channel = self._login.start(command)
            self._await_start(where)
        except BaseException:
            self._login.close()
            raise

    def _await_start(self, where: str) -> None:
        until = time.monotonic() + LOGIN_DEADLINE
        while STARTED not in self._words:
            self._channel.settimeout(max(0.01, until - time.monotonic()))
            try:
                data = self._channel.recv_stderr(_PART)
            except TimeoutError:
                raise UnreachableError(
                    f"{where}: no login shell within {LOGIN_DEADLINE:.0f} s"
                ) from None
            self._take(data)
            if not data:
                return  # the login shell has ended; what it wrote says why
        while self._words.popleft() != STARTED:
            pass

    def send(self, data: bytes) -> None:
        """Send all of it, or raise OSError."""
        until = time.monotonic() + _SEND_TIMEOUT
        view = memoryview(data)
        while view:
            try:
                sent = self._channel.send(bytes(view[:_PART]))
            except TimeoutError:  # the channel has one timeout, and `receive` a short one
                if time.monotonic() > until:
                    raise
                continue
            if sent == 0:
                raise BrokenPipeError(32, "the channel is closed")
            view = view[sent:]

    def receive(self, seconds: float) -> bytes | None:
        """Return received bytes, None after a timeout, b"" at the end."""
        self._channel.settimeout(seconds)
        try:
            data = bytes(self._channel.recv(_PART))
        except TimeoutError:
            data = None
        if data == b"":
            self._channel.status_event.wait(1.0)  # stderr comes before the exit status
        self._drain()
        return data

    def last_output(self) -> str:
        """Return the end of stderr."""
        self._drain()
        return "\n".join((*self._words, self._rest.decode(errors="replace"))).strip("\n")

    def close(self) -> None:
        """End it and its login. Idempotent."""
        with contextlib.suppress(OSError, EOFError):
            self._channel.close()
        self._login.close()

    def _drain(self) -> None:
        with self._draining:
            while self._channel.recv_stderr_ready() and (data := self._channel.recv_stderr(_PART)):
                self._take(data)

    def _take(self, data: bytes) -> None:
        *lines, rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._words.append(line[:_LONGEST].decode(errors="replace").rstrip("\r"))
        self._rest = rest[:_LONGEST]
