"""Moments as text: RFC 3339 in UTC to the second, the same on every host."""

from __future__ import annotations

import datetime
import re
import time

UTC_FORMAT = "%Y-%m-%dT%H:%M:%SZ"
"""Format of `time.strftime`, for a time from `time.gmtime`."""
_AT_START = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ\b")


def format_timestamp(seconds: float | None = None) -> str:
    """Return Unix seconds, or now, as `2026-11-21T13:00:05Z`."""
    return time.strftime(UTC_FORMAT, time.gmtime(seconds))


def leading_timestamp(line: str) -> int | None:
    """Return the Unix seconds of the timestamp with which a line begins; None if there is none."""
    if (found := _AT_START.match(line)) is None:
        return None
    try:
        return int(datetime.datetime.fromisoformat(found[0]).timestamp())
    except ValueError:  # such as the month 13
        return None
