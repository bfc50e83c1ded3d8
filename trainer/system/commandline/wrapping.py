"""Break lines between words for a terminal, for both programs. Standard library only."""

from __future__ import annotations

import logging
import os
import shlex
import textwrap
import time
from collections.abc import Iterable
from typing import TextIO

from trainer.system.commandline.sanitize import sanitize_text
from trainer.system.timestamp import UTC_FORMAT


def terminal_width(stream: TextIO | None) -> int | None:
    """Return the width of the terminal of a stream; None if it has none."""
    if stream is None or not stream.isatty():
        return None
    given = os.environ.get("COLUMNS", "")
    if given.isdecimal() and int(given):
        return int(given)
    try:
        return os.get_terminal_size(stream.fileno()).columns or None
    except (OSError, ValueError):
        return None


def wrap_line(line: str, width: int | None, indent: str = "") -> list[str]:
    """Return a line as lines of at most `width` characters, those after the first indented.

    No word is broken: one that is longer has a line for itself. Without a width nothing is broken.
    """
    if width is None or len(line) <= width:
        return [line]
    return textwrap.wrap(
        line,
        max(width, len(indent) + 1),
        subsequent_indent=indent,
        expand_tabs=False,
        replace_whitespace=False,
        break_long_words=False,
        break_on_hyphens=False,
    ) or [line]


def wrap_command(line: str, width: int | None) -> list[str]:
    r"""Return a shell's command, which may be indented, as lines that end with ` \`.

    Pasted into a shell they are the same command.
    """
    if width is None or len(line) <= width:
        return [line]
    start = line[: len(line) - len(line.lstrip())]
    try:
        words = [shlex.quote(word) for word in shlex.split(line)]
    except ValueError:  # not a shell's: a quote without an end
        return [line]
    lines = [start + words[0]]
    for word in words[1:]:
        if len(lines[-1]) + len(word) + 3 <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(f"{start}    {word}")
    return [f"{part} \\" for part in lines[:-1]] + lines[-1:]


def wrap_card(card: Iterable[str], width: int | None) -> list[str]:
    """Return a run's card, whose indented lines are commands."""
    return [
        part
        for line in map(sanitize_text, card)
        for part in (
            wrap_command(line, width) if line.startswith("  ") else wrap_line(line, width, "  ")
        )
    ]


class LogFormatter(logging.Formatter):
    """Formats a log line with its time: on a terminal the local time of the day, and broken between
    words, else UTC with the date."""

    def __init__(self, stream: TextIO | None) -> None:
        on_terminal = terminal_width(stream) is not None
        super().__init__("%(asctime)s %(message)s", "%H:%M:%S" if on_terminal else UTC_FORMAT)
        self.converter = time.localtime if on_terminal else time.gmtime
        self._stream = stream

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter`."""
        width = terminal_width(self._stream)
        indent = " " * len("00:00:00 ")
        lines = super().format(record).split("\n")
        return "\n".join(part for line in lines for part in wrap_line(line, width, indent))
