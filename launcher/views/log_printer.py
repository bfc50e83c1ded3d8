"""The format of log lines: plain, after the name of their process, or as JSON lines."""

from __future__ import annotations

import datetime
import json
import os
import re
import sys
from collections.abc import Callable, Sequence

from launcher.errors import ConfigError
from launcher.plan.plan import ProcessPlan
from launcher.terminal import visible_lines
from trainer.system.commandline.wrapping import terminal_width, wrap_line

_COLOURS = (36, 33, 35, 32, 34, 96, 93, 95, 92, 94)
"""Colours of the prefixes, by rank; the coordinator's is bold."""
_BAR = " | "
_INDENT = " " * len("00:00:00 ")
"""Indentation of a wrapped line: below the text behind the time."""
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


class LinePrinter:
    """Prints lines on stdout: plain, with the name in front, or as JSON lines."""

    def __init__(self, as_json: bool, chosen: Sequence[ProcessPlan]) -> None:
        self._as_json = as_json
        self._prefixes: dict[str, str] = {}
        self._width = terminal_width(sys.stdout)
        if len(chosen) > 1:
            width = max(len(process.name) for process in chosen)
            if self._width is not None:
                self._width = max(20, self._width - width - len(_BAR))
            for process in chosen:
                self._prefixes[process.name] = _format_prefix(process, width, wants_colour())

    def print_lines(self, process: ProcessPlan, attempt: int, lines: Sequence[bytes]) -> None:
        """Print complete lines (without their ends) of one attempt."""
        for line in lines:
            if self._as_json:  # which escapes what a terminal would obey
                tree = {
                    "schema": "motley.log/1",
                    "name": process.name,
                    "rank": process.rank,
                    "host": process.host,
                    "attempt": attempt,
                    "line": line.decode(errors="replace"),
                }
                self._write_line(json.dumps(tree))
                continue
            for shown in visible_lines(line):
                for part in wrap_line(shown, self._width, _INDENT):
                    self._write_line(self._prefixes.get(process.name, "") + part)
        sys.stdout.buffer.flush()

    @staticmethod
    def _write_line(line: str) -> None:
        # As the terminal reads it: in another encoding the bytes of a letter may be a command.
        data = line.encode(sys.stdout.encoding or "utf-8", "backslashreplace")
        sys.stdout.buffer.write(data + b"\n")


def wants_colour() -> bool:
    """Whether stdout shows colours and NO_COLOR is not set (https://no-color.org)."""
    return (
        sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    )


def parse_since(text: str) -> Callable[[float], float]:
    """Return how a moment follows from the clock of a host: `10m` ago, or at an ISO 8601 time.

    A time without a zone is this machine's local time.

    Raises:
        ConfigError: it is neither.
    """
    if found := re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text):
        seconds = float(found[1]) * _UNITS[found[2]]
        return lambda clock: clock - seconds
    try:
        moment = datetime.datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError):
        raise ConfigError(
            f"--since {text}: give an age such as 90s, 10m, 2h or 1d, or a time such as "
            "2026-11-21T13:00"
        ) from None
    return lambda _: moment


def _format_prefix(process: ProcessPlan, width: int, coloured: bool) -> str:
    padded = f"{process.name:<{width}}{_BAR}"
    if not coloured:
        return padded
    colour = 1 if process.rank is None else _COLOURS[process.rank % len(_COLOURS)]
    return f"\x1b[{colour}m{padded}\x1b[0m"
