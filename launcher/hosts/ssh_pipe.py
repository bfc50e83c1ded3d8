"""Bytes to and from a program on a host: a channel of a login."""

from __future__ import annotations

import threading
import time

from launcher.hosts.login import Login
from launcher.hosts.rpc import STARTED
from launcher.hosts.ssh_config import CONNECT_TIMEOUT, SshRoute

_SEND_TIMEOUT = 10.0
_PART = 1 << 16


class SshPipe(Login):
    """A `Pipe` (`rpc.py`): a login with the channel of a command of its login shell."""

    def __init__(self, where: str, route: SshRoute, command: str) -> None:
        """Log in and start the command.

        Raises:
            UnreachableError, ConfigError: as `Login`.
        """
        super().__init__(where, route)
        self._words = b""
        self._draining = threading.Lock()
        with self._close_on_failure():
            self._channel = self._connection.create_session()
            self._channel.settimeout(CONNECT_TIMEOUT)
            self._channel.exec_command(command)

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
        self._drain_output()
        return data

    def last_output(self) -> str:
        """Return the end of stderr, without what start-up files of the login shell wrote."""
        self._drain_output()
        return self._words.decode(errors="replace").rpartition(f"{STARTED}\n")[2].strip("\n")

    def _drain_output(self) -> None:
        with self._draining:
            while self._channel.recv_stderr_ready() and (data := self._channel.recv_stderr(_PART)):
                self._words = (self._words + data)[-_PART:]
