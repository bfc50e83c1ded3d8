"""The launcher's agent on a host: `python -P -m launcher.agent`, started over SSH.

It answers requests (`frames.py`) from stdin on stdout until stdin ends, each in its own
thread: a request that hangs in a dead mount delays no other. Processes it started outlive it; its
locks end with it. It opens no port, and has the rights of its user. Standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from launcher.agent import frames, operations
from launcher.errors import LauncherError
from launcher.files import default_state_folder
from launcher.inventory.facts.machine import installed_wheel

UNIT_PROGRAM = "/usr/local/sbin/motley-unit"
"""The command that the trainer role installs if processes can be units."""

SILENCE = 120.0
"""Seconds without a message (a launcher pings every few) after which the launcher is gone."""

MOST_REQUESTS = 64
"""Concurrent requests at most: hanging ones must not fill the host with threads."""

MOST_UPLOAD = 256 << 20
"""Total bytes of the files that are being sent to this host."""


class Agent:
    """Answers requests until its input ends. Not reusable."""

    def __init__(self, requests: int, answers: int) -> None:
        """Take the descriptors of both directions."""
        self._requests = requests
        self._answers = answers
        self._sending = threading.Lock()
        self._state = threading.Lock()
        self._under_way = 0
        self._locks: dict[str, contextlib.ExitStack] = {}
        self._given_up: set[str] = set()
        self._uploads: dict[str, bytearray] = {}
        self._own: dict[str, Callable[..., Any]] = {
            "read": _read_packed,
            "append": self._append,
            "write": self._write,
            "lock": self._lock,
            "unlock": self._unlock,
        }

    def serve(self) -> None:
        """Send the hello and answer until stdin ends or is silent; all locks are free on return."""
        try:
            self._send_frame(self._hello_frame())
            splitter = frames.LineSplitter()
            while select.select([self._requests], [], [], SILENCE)[0]:
                data = os.read(self._requests, 1 << 16)
                if not data:
                    return
                for line in splitter.feed(data):
                    self._take_line(line)
        finally:
            with self._state:
                self._given_up.update(self._locks)
                for held in self._locks.values():
                    held.close()

    def _hello_frame(self) -> dict[str, Any]:
        try:
            release = version("motley")
        except PackageNotFoundError:
            release = "unknown"
        return {
            "schema": frames.SCHEMA,
            "version": release,
            "wheel": installed_wheel(Path(sys.prefix)) or None,
            "python": sys.executable,
            "user": operations.user_name(),
            "units": Path(UNIT_PROGRAM).exists() and Path("/run/systemd/system").is_dir(),
            "state_folder": str(default_state_folder()),
            "pid": os.getpid(),
        }

    def _take_line(self, line: bytes | None) -> None:
        number: Any = None
        try:
            if line is None:
                raise frames.FrameError("a line longer than the limit of a frame")
            request = frames.decode_frame(line)
            number, name = request.get("id"), request.get("op")
            arguments: Any = request.get("args") or {}
            if name == "ping":  # in this thread: proves that the host lives, not its disks
                return self._send_frame({"id": number, "result": None})
            with self._state:
                if self._under_way >= MOST_REQUESTS:
                    raise BlockingIOError(
                        errno.EAGAIN, f"{MOST_REQUESTS} requests are already in progress"
                    )
                self._under_way += 1
        except Exception as error:  # whatever came in, the next line is answered
            return self._send_frame({"id": number, "error": frames.error_frame(error)})
        threading.Thread(
            target=self._answer_request, args=(number, name, arguments), daemon=True
        ).start()
        return None

    def _answer_request(self, number: Any, name: Any, arguments: Any) -> None:
        try:
            answer = {
                "id": number,
                "result": operations.perform_operation(str(name), arguments, self._own),
            }
        except Exception as error:  # the asking side raises it again
            answer = {"id": number, "error": frames.error_frame(error)}
        finally:
            with self._state:
                self._under_way -= 1
        self._send_frame(answer)

    def _send_frame(self, frame: dict[str, Any]) -> None:
        try:
            line = frames.encode_frame(frame)
        except (TypeError, ValueError) as error:
            line = frames.encode_frame({"id": frame.get("id"), "error": frames.error_frame(error)})
        with self._sending, contextlib.suppress(BrokenPipeError):
            while line:
                line = line[os.write(self._answers, line) :]

    def _append(self, token: str, data: str) -> None:
        piece = frames.unpack_bytes(data)
        with self._state:
            if sum(map(len, self._uploads.values())) + len(piece) > MOST_UPLOAD:
                self._uploads.pop(token, None)
                raise OSError(
                    errno.EFBIG, f"more than {MOST_UPLOAD >> 20} MiB of uploads to this host"
                )
            self._uploads.setdefault(token, bytearray()).extend(piece)

    def _write(self, path: str, data: str, token: str | None) -> None:
        with self._state:
            before = self._uploads.pop(token, bytearray()) if token else bytearray()
        operations.write_file(path, bytes(before) + frames.unpack_bytes(data))

    def _lock(self, path: str, purpose: str, token: str) -> None:
        held = contextlib.ExitStack()
        held.enter_context(operations.lock_file(path, purpose))
        with self._state:
            if token in self._given_up:  # the caller's deadline has passed
                held.close()
            else:
                self._locks[token] = held

    def _unlock(self, token: str) -> None:
        with self._state:
            held = self._locks.pop(token, None)
            if held is None:
                self._given_up.add(token)
            else:
                held.close()


def _read_packed(path: str, offset: int, limit: int) -> str:
    return frames.pack_bytes(operations.read_file(path, offset, min(limit, frames.PIECE)))


def answer_once(name: str, arguments: str) -> None:
    """Print the answer to one request as JSON, its arguments being that, too; or end with why."""
    try:
        result = operations.perform_operation(name, frames.decode_frame(arguments.encode()))
    except (LauncherError, OSError, ValueError, TypeError, ImportError) as error:
        sys.exit(f"{name}: {error}")
    sys.stdout.write(json.dumps(result, default=asdict) + "\n")


def main() -> int:
    """Answer on stdout, to which nothing else in this process may write, until stdin ends."""
    requests, answers = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)  # a program that a question starts must not read requests
    os.dup2(2, 1)
    Agent(requests, answers).serve()
    sys.stderr.flush()
    os._exit(0)  # a thread that hangs in a dead mount must not keep this process
