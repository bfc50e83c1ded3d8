"""One open link to an agent: requests, answers and signs of life.

Pings detect a silent host during any request. A broken link stays broken; `remote.py` opens
another.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, Protocol

from launcher.agent import frames
from launcher.errors import UnreachableError
from trainer.system.process.heartbeat import HeartbeatMonitor, start_heartbeat

STARTED = "motley: started"
"""A line before the hello: the login shell has started what starts the agent."""

HELLO_DEADLINE = 18.0
"""Seconds that a login shell and an agent may take to start: a cold disk reads Python first."""

PING = 3.0
"""Seconds between two signs of life."""

SILENCE = 12.0
"""Seconds without any sign of life after which a link is given up."""

_MOST_NOISE = 50
"""Lines before the hello that are kept: output of a login shell's start-up files."""
_LONGEST_NOISE = 1000
"""Bytes of such a line."""


class Pipe(Protocol):
    """Bytes to and from an agent. One thread calls `send`, another `receive`."""

    host_key: str
    """The fingerprint of the key that the host has shown."""

    def send(self, data: bytes) -> None:
        """Send all of it, or raise OSError."""

    def receive(self, seconds: float) -> bytes | None:
        """Return received bytes, None after a timeout, b"" at the end; may raise OSError."""

    def last_output(self) -> str:
        """Return the end of the agent's stderr."""
        ...

    def run_program(self, argv: tuple[str, ...], deadline: float) -> tuple[int, str]:
        """Run a program next to the agent; return its exit code and its output.

        Raises:
            OSError: it could not be started, or has not ended in time (TimeoutError).
        """
        ...

    def close(self) -> None:
        """End it, which also ends a waiting `receive`. Idempotent."""


class NoAgentError(UnreachableError):
    """The other end is not an agent; the details are its output."""

    has_ended = False
    """Whether it ended by itself, with a reason."""

    def as_reported(self) -> UnreachableError:
        """Return it as an error for people, with the last word."""
        last = next(
            (word for word in reversed(self.details) if not word.startswith("motley: ")), ""
        )
        return UnreachableError(str(self) if last in str(self) else f"{self}: {last}")


class AgentLink:
    """The pending requests on one pipe. Thread-safe."""

    def __init__(self, host: str, pipe: Pipe) -> None:
        """Wait for the agent's hello.

        Raises:
            NoAgentError: something else answered, or nothing.
        """
        self.pipe = pipe
        self.broken: str | None = None
        """Why it is."""
        self.noise: deque[str] = deque(maxlen=_MOST_NOISE)
        """Lines that came before the hello."""
        self.hello: dict[str, Any] = {}
        self._host = host
        self._numbers = itertools.count(1)
        self._waiting: dict[int, Future[dict[str, Any]]] = {}
        self._state = threading.Lock()
        self._sending = threading.Lock()
        self._greeted = threading.Event()
        self._silence = HeartbeatMonitor()
        self._has_ended = False
        self._ended = start_heartbeat(self._ping, PING)
        threading.Thread(target=self._receive_frames, name=f"agent of {host}", daemon=True).start()
        if not self._greeted.wait(HELLO_DEADLINE):
            self._fail_link(
                f"its {self._startup_state} did not start within {HELLO_DEADLINE:.0f} s"
            )
        if not self.hello:
            words = (*self.noise, *pipe.last_output().splitlines())
            error = NoAgentError(str(self.broken), [word for word in words if word.strip()])
            error.has_ended = self._has_ended
            raise error

    def call(self, operation: str, arguments: Mapping[str, Any], deadline: float) -> Any:
        """Return the answer to a request.

        Raises:
            UnreachableError: the link is broken, or there was no answer in time.
            OSError, LauncherError, ValueError: as the agent reported.
        """
        until = time.monotonic() + deadline
        answer: Future[dict[str, Any]] = Future()
        with self._state:
            if self.broken is not None:
                raise UnreachableError(self.broken)
            number = next(self._numbers)
            self._waiting[number] = answer
        try:
            self._send_frame({"id": number, "op": operation, "args": dict(arguments)}, deadline)
            frame = answer.result(max(0.0, until - time.monotonic()))
        except TimeoutError:
            is_responsive = self._silence.seconds < 2 * PING
            hint = "; the host itself answers: a disk or network mount may be hanging"
            raise UnreachableError(
                f"host {self._host}: no answer to `{operation}` within {deadline:.0f} s"
                f"{hint if is_responsive else ''}"
            ) from None
        finally:
            with self._state:
                self._waiting.pop(number, None)
        if "error" in frame:
            raise frames.to_error(frame["error"], self._host)
        return frame.get("result")

    def close(self) -> None:
        """End the link; waiting requests fail. Idempotent."""
        self._fail_link("the connection was closed")

    def _send_frame(self, frame: dict[str, Any], deadline: float) -> None:
        line = frames.encode_frame(frame)
        if not self._sending.acquire(timeout=max(0.0, deadline)):
            raise UnreachableError(f"host {self._host}: its agent accepts no more requests")
        try:
            self.pipe.send(line)
        except OSError as error:
            self._fail_link(_describe_lost_connection(error))
            raise UnreachableError(str(self.broken)) from None
        finally:
            self._sending.release()

    def _receive_frames(self) -> None:
        splitter = frames.LineSplitter()
        try:
            while not self._ended.is_set():
                data = self.pipe.receive(1.0)
                if data is None:
                    if self._silence.observe() > SILENCE and self.hello:
                        return self._fail_link(
                            f"no heartbeat for {SILENCE:.0f} s; is it up and reachable?"
                        )
                    continue
                if not data:
                    words = self.pipe.last_output().strip().splitlines()
                    if words and not self.hello:  # the login works, what it starts does not
                        self._has_ended = True
                        return self._fail_link(f"its {self._startup_state} exited: {words[-1]}")
                    reason = f": {words[-1]}" if words else ""
                    return self._fail_link(f"connection lost, its agent exited{reason}")
                self._silence.observe(object())
                for line in splitter.feed(data):
                    self._take_line(line)
        except frames.FrameError as error:
            self._fail_link(f"its agent sent {error}")
        except OSError as error:
            self._fail_link(_describe_lost_connection(error))
        return None

    def _take_line(self, line: bytes | None) -> None:
        if line is None:
            raise frames.FrameError(f"a line of more than {frames.LIMIT} bytes")
        if not self.hello:
            return self._take_hello(line)
        frame = frames.decode_frame(line)
        number = frame.get("id")
        with self._state:
            answer = self._waiting.pop(number, None) if isinstance(number, int) else None
        if answer is not None:  # else the request has timed out
            answer.set_result(frame)
        return None

    def _take_hello(self, line: bytes) -> None:
        try:
            frame = frames.decode_frame(line)
        except frames.FrameError:
            frame = {}
        if str(frame.get("schema", "")).startswith("motley.agent/"):
            self.hello = frame
            self._greeted.set()
        else:
            self.noise.append(line[:_LONGEST_NOISE].decode(errors="replace"))

    @property
    def _startup_state(self) -> str:
        """The program that was started, before its hello."""
        return "agent" if STARTED in self.noise else "login shell"

    def _ping(self) -> None:
        if self.hello:
            with contextlib.suppress(UnreachableError):
                self._send_frame({"id": next(self._numbers), "op": "ping", "args": {}}, 1.0)

    def _fail_link(self, reason: str) -> None:
        with self._state:
            self.broken = self.broken or f"host {self._host}: {reason}"
            waiting, self._waiting = self._waiting, {}
        self._ended.set()
        self._greeted.set()
        for answer in waiting.values():
            answer.set_exception(UnreachableError(self.broken))
        self.pipe.close()


def _describe_lost_connection(error: OSError) -> str:
    return f"connection lost ({error.strerror or error or type(error).__name__})"
