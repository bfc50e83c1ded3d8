"""Escape text before it is printed on a terminal.

A log line, a host's error or a device's name may contain escape sequences that move the cursor,
rename the window or inject input, and characters that reorder a line. All printed text goes through
`sanitize_text`. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager

from trainer.system.commandline.sanitize import sanitize_text
from trainer.system.commandline.wrapping import terminal_width, wrap_line

_CLEAR = "\r\x1b[2K"
"""Go to the start of the line and clear it."""


def note(line: str) -> None:
    """Print one line on stderr; on a terminal it is broken between words."""
    if _moves_cursor():
        sys.stderr.write(_CLEAR)  # the line that `redrawing` has drawn
    for part in wrap_line(sanitize_text(line), terminal_width(sys.stderr), "  "):
        sys.stderr.write(f"{part}\n")
    sys.stderr.flush()


@contextlib.contextmanager
def redraw_line(report: Callable[[str], None]) -> Generator[Callable[[str], None]]:
    """Yield what replaces one line on a terminal, whose last content stays; else `report`."""
    if not _moves_cursor():
        yield report
        return
    last = ""

    def draw(line: str) -> None:
        nonlocal last
        last, text, width = line, sanitize_text(line), terminal_width(sys.stderr) or 80
        sys.stderr.write(_CLEAR + (text if len(text) < width else f"{text[: width - 2]}…"))
        sys.stderr.flush()

    try:
        yield draw
    finally:
        if last:
            note(last)


def _moves_cursor() -> bool:
    """Return whether stderr is a terminal that can clear a line."""
    return sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def show_progress(what: str) -> AbstractContextManager[None]:
    """Note what takes longer than a second, on a terminal; a pipe or a log gets nothing."""
    if not sys.stderr.isatty():
        return contextlib.nullcontext()
    from trainer.system.process.slow_log import log_if_slow

    return log_if_slow(what, note)


def visible_lines(line: bytes) -> list[str]:
    """Return a line of a log as the lines that it shows: a progress bar draws many over each other.

    What is not UTF-8 is shown byte by byte.
    """
    text = line.decode(errors="backslashreplace")
    if "\r" not in text:
        return [sanitize_text(text)]
    return [sanitize_text(part) for part in text.split("\r") if part] or [""]
