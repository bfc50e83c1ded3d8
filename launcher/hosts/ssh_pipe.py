"""Bytes to and from a program on a host: SSH channels, and the streams below them.

It uses paramiko's objects only by their methods; `ssh.py` makes them.
"""

from __future__ import annotations

import contextlib
import shlex
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from launcher.errors import UnreachableError
from launcher.hosts import ssh_config
from launcher.hosts.ssh_config import CONNECT_TIMEOUT

_SEND_TIMEOUT = 10.0
_PART = 1 << 16
_TAIL = 64
"""Lines of stderr that are kept."""
_MOST_OUTPUT = 1 << 20
"""Bytes of a program's output that are kept."""


class Carrier(Protocol):
    """A stream below a login, to be closed after it."""

    def close(self) -> None:
        """End it."""
        ...


class Hop:
    """A login on a host, and the stream below it."""

    def __init__(
        self,
        where: str,
        client: Any,
        carriers: Sequence[Carrier],
        errors: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        self._where = where
        self._client = client
        self._carriers = carriers
        self._errors = errors
        """Turns paramiko's exceptions into UnreachableErrors."""

    def start(self, command: str) -> Any:
        """Return the channel of a command in the login shell of the host.

        Raises:
            UnreachableError: the login has ended, or the host allows no more channels.
        """
        with self._errors(self._where):
            channel = self._client.get_transport().open_session(timeout=CONNECT_TIMEOUT)
            channel.settimeout(CONNECT_TIMEOUT)
            channel.exec_command(command)
            return channel

    def open_stream(self, hostname: str, port: int, where: str) -> Any:
        """Return a byte stream from this host to another.

        Raises:
            UnreachableError: this host cannot reach it.
        """
        with self._errors(where):
            return self._client.get_transport().open_channel(
                "direct-tcpip", (hostname, port), ("127.0.0.1", 0), timeout=CONNECT_TIMEOUT
            )

    def close(self) -> None:
        """End it and the stream below it. Idempotent."""
        with contextlib.suppress(UnreachableError), self._errors(self._where):
            self._client.close()  # sends a disconnect, if the host is still there
        for carrier in self._carriers:
            carrier.close()


class ProxyProcess:
    """The program of a ProxyCommand; the launcher's end of it is a socket."""

    def __init__(self, command: str) -> None:
        self.socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                ssh_config.shell_command(command),
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the launcher alone
            )

    def close(self) -> None:
        """End it."""
        self.socket.close()
        self._process.terminate()
        try:
            self._process.wait(2.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class SshPipe:
    """A `Pipe` (`rpc.py`) to a command; the login ends with it."""

    def __init__(self, hop: Hop, command: str) -> None:
        self._hop = hop
        self._channel = hop.start(command)
        self._words: deque[str] = deque(maxlen=_TAIL)
        self._draining = threading.Lock()

    def send(self, data: bytes) -> None:
        """Send all of it, or raise OSError."""
        until = time.monotonic() + _SEND_TIMEOUT
        view = memoryview(data)
        while view:
            try:
                sent = self._channel.send(bytes(view[:_PART]))
            except TimeoutError:  # the channel's own timeout is `receive`'s, and short
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
            self._channel.status_event.wait(1.0)  # stderr arrives before the exit status
        self._drain()
        return data

    def last_words(self) -> str:
        """Return the end of stderr."""
        self._drain()
        return "\n".join(self._words)

    def run(self, argv: tuple[str, ...], deadline: float) -> tuple[int, str]:
        """Run a program on the host over a channel of its own."""
        until = time.monotonic() + deadline
        with contextlib.closing(self._hop.start(shlex.join(argv))) as channel:
            channel.set_combine_stderr(True)
            output = bytearray()
            while part := _receive(channel, until):
                output += part[: _MOST_OUTPUT - len(output)]
            if not channel.status_event.wait(max(0.01, until - time.monotonic())):
                raise TimeoutError
            return int(channel.exit_status), output.decode(errors="replace")

    def close(self) -> None:
        """End it and its login. Idempotent."""
        with contextlib.suppress(OSError, EOFError):
            self._channel.close()
        self._hop.close()

    def _drain(self) -> None:
        with self._draining:
            while self._channel.recv_stderr_ready():
                text = bytes(self._channel.recv_stderr(_PART)).decode(errors="replace")
                self._words.extend(text.splitlines())


def _receive(channel: Any, until: float) -> bytes:
    if time.monotonic() > until:  # even if it never stops sending
        raise TimeoutError
    channel.settimeout(max(0.01, until - time.monotonic()))
    return bytes(channel.recv(_PART))
