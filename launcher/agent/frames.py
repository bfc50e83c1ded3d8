"""The protocol between a launcher and an agent: one JSON object per line.

    {"id": 7, "op": "read", "args": {...}}                 launcher -> agent
    {"id": 7, "result": ...} or {"id": 7, "error": {...}}  agent -> launcher

Bytes travel as base64 text. The length of a line is limited, so neither side can exhaust the
other's memory. What an agent needs of it is the standard library's.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, cast

from launcher import errors
from launcher.errors import LauncherError, UnreachableError

SCHEMA = "motley.agent/2"

PIECE = 1 << 20
"""Bytes of a file that travel in one frame."""

LIMIT = 4 << 20
"""Bytes that a line may have."""


class FrameError(ValueError):
    """A line that is not a frame."""


def encode_frame(frame: dict[str, Any]) -> bytes:
    """Return a frame as its line; dataclasses become their fields.

    Raises:
        FrameError: it is longer than a line may be.
    """
    line = json.dumps(frame, separators=(",", ":"), default=asdict).encode() + b"\n"
    if len(line) > LIMIT:
        raise FrameError(f"a frame of {len(line)} bytes; the limit is {LIMIT}")
    return line


def decode_frame(line: bytes) -> dict[str, Any]:
    """Return the frame of a line.

    Raises:
        FrameError: it is not a JSON object.
    """
    try:
        frame: Any = json.loads(line)
    except (ValueError, RecursionError):
        raise FrameError("a line that is not JSON") from None
    if not isinstance(frame, dict):
        raise FrameError("a line that is not a JSON object")
    return cast("dict[str, Any]", frame)


def pack_bytes(data: bytes) -> str:
    """Return bytes as text."""
    return base64.b64encode(data).decode("ascii")


def unpack_bytes(text: Any) -> bytes:
    """Return the bytes of such a text.

    Raises:
        FrameError: it is none.
    """
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError, TypeError):
        raise FrameError("bytes that are not base64") from None


class LineSplitter:
    """Cuts a byte stream into lines; None stands for a line that was too long and is dropped."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._rest = bytearray()
        self._skipping = False

    def feed(self, data: bytes) -> Iterator[bytes | None]:
        """Take the next bytes; yield the lines that they complete, without their ends."""
        first, *more = data.split(b"\n")
        yield from self._extend(first, ends=bool(more))
        for index, part in enumerate(more, 1):
            yield from self._extend(part, ends=index < len(more))

    def _extend(self, part: bytes, ends: bool) -> Iterator[bytes | None]:
        if not self._skipping:
            self._rest += part
            if len(self._rest) > self._limit:
                self._rest.clear()
                self._skipping = True
        if ends:
            yield None if self._skipping else bytes(self._rest)
            self._rest.clear()
            self._skipping = False


def error_frame(error: Exception) -> dict[str, Any]:
    """Return an error in the form that `to_error` turns back into one."""
    if isinstance(error, LauncherError):
        return {"kind": type(error).__name__, "text": str(error), "details": list(error.details)}
    if isinstance(error, OSError) and error.errno is not None:
        path = error.filename if isinstance(error.filename, str) else None
        return {"kind": "OSError", "errno": error.errno, "text": error.strerror, "path": path}
    kind = "ValueError" if isinstance(error, ValueError) else "RuntimeError"
    return {"kind": kind, "text": str(error) if kind == "ValueError" else repr(error)}


@dataclass(frozen=True)
class _ReportedError:
    """An error as `error_frame` describes it."""

    kind: str
    text: str | None
    errno: int = 0
    path: str | None = None
    details: tuple[str, ...] = ()


def to_error(answer: object, host: str) -> Exception:
    """Return the error that an agent reported; one for users names its host."""
    from trainer.system.untrusted_data import (
        validate_data,  # pydantic, which a visited host may lack
    )

    try:
        failure = validate_data(_ReportedError, answer, "error", lines=True)
    except ValueError:
        return UnreachableError(f"host {host}: invalid error of its agent")
    kind, text = failure.kind, str(failure.text)
    if kind == "OSError":
        return OSError(failure.errno, text, failure.path)
    found: Any = getattr(errors, kind, None)
    if isinstance(found, type) and issubclass(found, LauncherError):
        return found(text if host in text else f"host {host}: {text}", failure.details)
    if kind == "ValueError":
        return ValueError(f"host {host}: {text}")
    return RuntimeError(f"host {host}: its agent has a defect: {text}")
