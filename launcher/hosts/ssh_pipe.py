"""Bytes to and from a program on a host, through an ssh process with a shared login."""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import secrets
import select
import shlex
import socket
import subprocess
import threading
import time
from collections import deque

from launcher.errors import UnreachableError
from launcher.hosts.bootstrap import STARTED
from launcher.hosts.ssh_config import SshRoute, environment, private_folder
from launcher.hosts.ssh_errors import UNWRITTEN, login_error, shown_key

LOGIN_DEADLINE = 20.0
"""Seconds until the login shell has started, jump hosts included."""

_SEND_TIMEOUT = 10.0
_PART = 1 << 16
_LONGEST = 1000
"""Bytes of a line of stderr that are kept in one piece."""
_MOST_OUTPUT = 1 << 20
"""Bytes of a program's output that are kept."""
_FAILED = 255
"""Exit code of ssh when it has failed itself."""
_OWN = re.compile(r"debug\d: |Transferred: |Bytes per second: ")
"""What `ssh -v` writes besides errors."""


_OPEN: set[SshPipe] = set()


@atexit.register
def _close_all() -> None:
    """End every ssh, also those that a thread still waits for."""
    for pipe in _OPEN.copy():
        pipe.close()


class SshPipe:
    """A `Pipe` (`rpc.py`) to a command that writes `STARTED` to stderr; its login ends with it."""

    def __init__(self, where: str, route: SshRoute, command: str) -> None:
        """Log in.

        Raises:
            UnreachableError: the login failed; each cause has its own message.
        """
        self._control = private_folder() / secrets.token_hex(4)
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(_SEND_TIMEOUT)
        self._readable = select.poll()  # select() knows no descriptors above 1023
        self._readable.register(self._socket, select.POLLIN)
        self._closed = False
        self._reading, self._writing = threading.Lock(), threading.Lock()
        self._log: deque[str] = deque(maxlen=1000)
        self._words: deque[str] = deque(maxlen=64)
        self._decided = threading.Event()
        self._program, *options = route.command
        master = ["-o", "ControlMaster=yes", "-o", f"ControlPath={self._control}"]
        with theirs:
            self._process = subprocess.Popen(
                [self._program, *master, *options, "-v", "--", route.destination, command],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=subprocess.PIPE,
                env=environment(),
                start_new_session=True,  # Ctrl-C is for the launcher alone
            )
        _OPEN.add(self)
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        try:
            self._await_login(where, route)
        except BaseException:
            self.close()
            raise

    def _await_login(self, where: str, route: SshRoute) -> None:
        if not self._decided.wait(LOGIN_DEADLINE):
            raise UnreachableError(f"{where}: no login shell within {LOGIN_DEADLINE:.0f} s")
        log = "\n".join(self._log)
        if STARTED in self._log:
            if UNWRITTEN not in log:
                return
        elif self._process.wait() != _FAILED:
            return  # the login shell has ended; what it wrote says why
        last = self._words[-1] if self._words else "the login failed"
        error = login_error(where, log, route.jumps, route.records)
        raise error or UnreachableError(f"{where}: {last}")

    def send(self, data: bytes) -> None:
        """Send all of it, or raise OSError."""
        with self._writing:
            self._socket.sendall(data)

    def receive(self, seconds: float) -> bytes | None:
        """Return received bytes, None after a timeout, b"" at the end."""
        with self._reading:
            if self._closed:
                return b""
            if not self._readable.poll(seconds * 1000):
                return None
            data = self._socket.recv(_PART)
        if not data:
            self._listener.join(1.0)  # the end of stderr may come after that of stdout
        return data

    @property
    def host_key(self) -> str:
        """The fingerprint of the key that the host has shown."""
        return shown_key("\n".join(self._log))

    def last_output(self) -> str:
        """Return the end of stderr."""
        return "\n".join(tuple(self._words))

    def run(self, argv: tuple[str, ...], deadline: float) -> tuple[int, str]:
        """Run a program on the host in the same login."""
        until = time.monotonic() + deadline
        # If the login is gone, the proxy that ends at once keeps ssh from opening another.
        shared = ["-S", str(self._control), "-o", "ControlMaster=no", "-o", "ProxyCommand=false"]
        process = subprocess.Popen(
            [self._program, "-T", "-F", "none", *shared, "--", "host", shlex.join(argv)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment(),
            start_new_session=True,
        )
        output = bytearray()
        with process:
            try:
                while part := _read(process, until):
                    output += part[: _MOST_OUTPUT - len(output)]
                code = process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise TimeoutError from None
            finally:
                process.kill()
        text = output.decode(errors="replace")
        if code == _FAILED:
            raise OSError(text.strip().rpartition("\n")[2] or "ssh failed")
        return code, text

    def close(self) -> None:
        """End it and its login. Idempotent."""
        if self._closed:
            return
        self._closed = True
        _OPEN.discard(self)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes who sends or receives
        self._process.terminate()
        try:
            self._process.wait(2.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            self._control.unlink(missing_ok=True)
        with self._reading, self._writing:
            self._socket.close()
        self._listener.join(1.0)

    def _listen(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as stream:
            for line in iter(lambda: stream.readline(_LONGEST), b""):
                text = line.decode(errors="replace").rstrip("\r\n")
                if not self._decided.is_set():
                    self._log.append(text)
                if text == STARTED:
                    self._words.clear()
                    self._decided.set()
                elif not _OWN.match(text):
                    self._words.append(text)
        self._decided.set()


def _read(process: subprocess.Popen[bytes], until: float) -> bytes:
    assert process.stdout is not None
    readable = select.poll()
    readable.register(process.stdout, select.POLLIN)
    seconds = until - time.monotonic()  # even if it never stops sending
    if seconds <= 0 or not readable.poll(seconds * 1000):
        raise TimeoutError
    return os.read(process.stdout.fileno(), _PART)
