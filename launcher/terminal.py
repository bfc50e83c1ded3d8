"""Escape text before it is printed on a terminal.

A log line, a host's error or a device's name may contain escape sequences that move the cursor,
rename the window or inject input, and characters that reorder a line. All printed text goes through
`visible`. Standard library only.
"""

from __future__ import annotations

import contextlib
import re
import sys
from contextlib import AbstractContextManager

_COLOURS = re.compile(r"(?:\x1b\[|\x9b)[0-9;:]*m")
_UNSAFE = re.compile(
    "[\x00-\x08\x0a-\x1f\x7f-\x9f"  # C0 without the tab, DEL, C1
    "\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"  # directions, and other line ends
    "\ufff9-\ufffb\U000e0000-\U000e007f"  # annotations and tags, which are invisible
    "\ud800-\udfff]"  # halves of characters, which no encoding takes
)


def note(line: str) -> None:
    """Print one line on stderr."""
    sys.stderr.write(f"{visible(line)}\n")
    sys.stderr.flush()


def working(what: str) -> AbstractContextManager[None]:
    """Note what takes longer than a second, on a terminal; a pipe or a log gets nothing."""
    if not sys.stderr.isatty():
        return contextlib.nullcontext()
    from trainer.system.process.announcement import announced

    return announced(what, note)


def visible(text: str) -> str:
    r"""Return a text as one line without effects: colours are removed, the rest is escaped
    (`\x1b`).

    Tabs stay. A line end is shown as well, since it could forge a line of another process.
    """
    if _UNSAFE.search(text) is None:
        return text
    return _UNSAFE.sub(_escape, _COLOURS.sub("", text))


def visible_lines(line: bytes) -> list[str]:
    """Return a line of a log as the lines that it shows: a progress bar draws many over each other.

    What is not UTF-8 is shown byte by byte.
    """
    text = line.decode(errors="backslashreplace")
    if "\r" not in text:
        return [visible(text)]
    return [visible(part) for part in text.split("\r") if part] or [""]


def _escape(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode("ascii")
