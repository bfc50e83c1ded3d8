"""Small files that are read while a run writes them: JSON lines, and JSON text.

A failed write never ends the run: it raises one alarm and is tried again.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


class Outage:
    """Raises one alarm when writes begin to fail, and no other until they succeed steadily."""

    _STEADY = 100

    def __init__(self, path: Path, on_alarm: Callable[[str], None]) -> None:
        self._path, self._on_alarm = path, on_alarm
        self._successes: int | None = None  # since the last failure

    def note_failure(self, reason: str) -> None:
        """Note a failure."""
        if self._successes is None:
            self._on_alarm(f"{self._path}: not written: {reason}; the run continues without it")
        self._successes = 0

    def note_success(self) -> None:
        """Note a success."""
        if self._successes is None:
            return
        # On a nearly full disk writes fail and succeed in turn: that is one outage.
        self._successes += 1
        if self._successes == self._STEADY:
            self._successes = None
            logger.info("%s: written again", self._path)


class LineFile:
    """Appends whole lines: one write a line, so that lines never mix."""

    def __init__(self, path: Path, on_alarm: Callable[[str], None]) -> None:
        self._path = path
        self._outage = Outage(path, on_alarm)
        self._descriptor = -1
        self._torn = False

    def write(self, line: str) -> None:
        """Append one line, given without a newline."""
        try:
            if self._descriptor < 0:
                self._open()
            # A line that a power cut or full disk tore must not swallow this one.
            data = (("\n" if self._torn else "") + line + "\n").encode()
            written = os.write(self._descriptor, data)
            self._torn = written < len(data)
            if self._torn:
                self._outage.note_failure("the disk wrote only part of a line")
            else:
                self._outage.note_success()
        except OSError as error:
            self._outage.note_failure(error.strerror or str(error))

    def close(self) -> None:
        """Close the file; a later write opens it again."""
        if self._descriptor >= 0:
            with suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = -1

    def _open(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._descriptor = os.open(self._path, flags, 0o644)
        size = os.fstat(self._descriptor).st_size
        self._torn = size > 0 and os.pread(self._descriptor, 1, size - 1) != b"\n"


def json_text(value: Any, indent: int | None = None) -> str:
    """Return standard JSON: NaN and infinities become null."""
    return json.dumps(_replace_nonfinite(value), indent=indent, allow_nan=False, ensure_ascii=False)


def _replace_nonfinite(value: Any) -> Any:
    """Replace NaN and infinities, which JSON does not have, by null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _replace_nonfinite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_replace_nonfinite(item) for item in value]
    return value
